"""Whether the front of a request still runs: Ray does not tell a replica that the caller of a stream has died.

Each front counts on in the key-value store of the cluster, and replicas look there.
"""

from __future__ import annotations

import time

from ray.experimental import internal_kv

_NAMESPACE = "cppbatch-fronts"
_LEASE_S = 20.0


def renew_lease(front: str) -> None:
    """Called by a front every few seconds. Waits for the cluster, as all functions here do."""
    internal_kv._internal_kv_put(front, repr(time.time()), namespace=_NAMESPACE)


def end_lease(front: str) -> None:
    """The front ends."""
    internal_kv._internal_kv_del(front, namespace=_NAMESPACE)


class LeaseWatch:
    """A replica's view of the fronts. The clocks of machines are not compared: a lease must only change."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[bytes | None, float]] = {}

    def expired(self, fronts: set[str]) -> set[str]:
        """Those of these fronts that have not renewed their lease for 20 s, as this replica has seen."""
        now = time.monotonic()
        self._seen = {front: seen for front, seen in self._seen.items() if front in fronts}
        for front in fronts:
            lease = internal_kv._internal_kv_get(front, namespace=_NAMESPACE)
            if front not in self._seen or self._seen[front][0] != lease:
                self._seen[front] = lease, now
        return {front for front, (_, since) in self._seen.items() if now > since + _LEASE_S}
