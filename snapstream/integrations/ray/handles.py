"""``HandleReplicas``: calls to replicas through a Ray Serve handle, with Ray's errors as ``ReplicaLost``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager, suppress

from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from snapstream.integrations.ray.board import Route
from snapstream.integrations.ray.messages import Parcel, Report
from snapstream.integrations.ray.replicas import ReplicaLost
from snapstream.request import Request


class HandleReplicas:
    """The replicas of one deployment; its router is ``BoardRouter``."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle
        self._streaming = handle.options(stream=True)

    async def generate(self, request: Request, route: Route) -> AsyncGenerator[Parcel, None]:
        """Parcels of a request. ReplicaLost. Closing it early aborts the request."""
        response = self._streaming.generate.remote(request, route)
        is_over = False
        try:
            while not is_over:
                with _losses():
                    parcel: Parcel = await anext(response)
                deltas = parcel.deltas.deltas
                is_over = parcel.fault is not None or any(delta.is_finished for delta in deltas)
                yield parcel
        except StopAsyncIteration:
            raise ReplicaLost("its answer ended early") from None
        finally:
            if not is_over:
                with suppress(RayError):
                    response.cancel()

    async def report(self, route: Route) -> Report:
        with _losses():
            report: Report = await self._handle.report.remote(route)
        return report

    async def reset_prefixes(self, namespace: str | None, route: Route) -> None:
        with _losses():
            await self._handle.reset_prefixes.remote(namespace, route)


@contextmanager
def _losses() -> Iterator[None]:
    """What Ray raises where a replica is gone, or was ended amid a call, as ReplicaLost."""
    try:
        yield
    except RayTaskError:  # a bug of ours in the replica
        raise
    except (RayError, RayServeException) as error:
        raise ReplicaLost(type(error).__name__) from error
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise ReplicaLost("it cancelled the call") from None
