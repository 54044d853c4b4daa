"""Ray's side of the choice of a replica: an alpha API of Ray, so it holds as little as it can.

Ray makes a router for each handle, on a thread of the ingress; a request's ``Route`` is still the ingress's own object
there, and so leads to its board, which chooses.
"""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from snapstream.integrations.ray.board import Route


class BoardRouter(RequestRouter):
    """Sends each call where the board of its route says."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """A rank for each replica: Ray takes the first that has room for another call."""
        route = None if pending_request is None else _route_of(pending_request)
        if route is None or route.board is None:
            return [candidate_replicas]
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        return [[by_name[name]] for name in route.board.rank(by_name, route)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        route = _route_of(pending_request)
        if route is not None and route.on_taken is not None:
            route.on_taken(replica_id.unique_id)


def _route_of(pending_request: PendingRequest) -> Route | None:
    return next((arg for arg in pending_request.args if isinstance(arg, Route)), None)
