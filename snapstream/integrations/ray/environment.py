"""What Ray reads from the environment, set before it is imported. No ray here.

Nothing that the user has set is changed.
"""

from __future__ import annotations

import os
from pathlib import Path

# For a cluster of our own. Ray kills a proxy that takes longer than 5 s to be ready, three times, and with it the
# start; and one that does not answer in 10 s, and with it all streams: a busy machine is no reason for either. And it
# gives a low priority to its workers, which are all that matters here.
OWN_CLUSTER = {
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "60",
    "RAY_worker_niceness": "0",
}
TOKEN = Path(".ray") / "auth_token"  # in the home folder; Ray writes it when it starts a cluster of its own


def prepare(address: str | None) -> None:
    """For a cluster of our own (None), or a client of the one at ``address``.

    A cluster that Ray starts asks for a token, but its clients show theirs only if they are told to.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a server tells nobody how it is used
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # a line of a request is not "repeated", however alike two are
    if address is None:
        for name, value in OWN_CLUSTER.items():
            os.environ.setdefault(name, value)
    elif (Path.home() / TOKEN).is_file():
        os.environ.setdefault("RAY_AUTH_MODE", "token")
