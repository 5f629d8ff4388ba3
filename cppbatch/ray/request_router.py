"""Ray Serve's request router, with the rule of `cluster/prefix_router.py`."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from cppbatch.cluster.prefix_router import Prefix, PrefixRouter

_UNSENT_S = 10.0  # a request that was not sent within this time was cancelled


class _Choice(NamedTuple):
    replica: ReplicaID
    at: float
    is_sent: bool


class PrefixRequestRouter(RequestRouter):
    """Chooses the replica of a request, in the process that has the deployment's handle.

    The first argument of a call that wants a prefix is `list[Prefix]` (`prompt_prefixes(request)`), made in the same
    process. Any other call goes to the replica with the fewest requests.

    Set it in the deployment's `RequestRouterConfig`: `request_router_class=PrefixRequestRouter`,
    `request_router_kwargs={"n_parallel": 16}`, which is the number of sequences that a replica computes at once.

    Serve's own queue lengths lag: they do not count a request between its choice and its sending, and the answer to the
    first request of a burst sets them back to 1. So requests are counted here too, from the choice to the end. The
    larger of the two numbers counts: Serve's has the requests of other handles.
    """

    def initialize_state(self, n_parallel: int) -> None:
        """Called by Serve with `request_router_kwargs`."""
        self._router: PrefixRouter[ReplicaID] = PrefixRouter(n_parallel)
        self._choices: dict[str, _Choice] = {}  # by internal request id
        self._counts: Counter[ReplicaID] = Counter()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The chosen replica, then all others, of which Serve takes the one with the fewest requests if the first is
        full (`max_ongoing_requests`)."""
        self._drop_unsent()
        if pending_request is not None:
            self._forget_request(pending_request.metadata.internal_request_id)  # an earlier choice
        loads = {replica.replica_id: self._load(replica.replica_id) for replica in candidate_replicas}
        chosen = self._router.choose(_prefixes(pending_request), loads)
        if pending_request is not None:
            self._count(pending_request, chosen, is_sent=False)
        first = [replica for replica in candidate_replicas if replica.replica_id == chosen]
        return [first, [replica for replica in candidate_replicas if replica.replica_id != chosen]]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Called by Serve when a replica has accepted a request."""
        self._count(pending_request, replica_id, is_sent=True)
        self._router.note(_prefixes(pending_request), replica_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Called by Serve when a request has ended, or was refused by the replica."""
        self._forget_request(internal_request_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Called by Serve when replicas have come or gone."""
        gone = set(self.curr_replicas) - {replica.replica_id for replica in replicas}
        super().update_replicas(replicas)
        for replica_id in gone:
            self._router.forget(replica_id)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Called by Serve when a call shows that a replica is dead."""
        super().on_replica_actor_died(replica_id)
        self._router.forget(replica_id)

    def _load(self, replica_id: ReplicaID) -> int:
        return max(self._counts[replica_id], self.replica_queue_len_cache.get(replica_id) or 0)

    def _count(self, request: PendingRequest, replica_id: ReplicaID, *, is_sent: bool) -> None:
        request_id = request.metadata.internal_request_id
        self._forget_request(request_id)
        self._choices[request_id] = _Choice(replica_id, time.monotonic(), is_sent)
        self._counts[replica_id] += 1

    def _forget_request(self, request_id: str) -> None:
        if choice := self._choices.pop(request_id, None):
            self._counts[choice.replica] -= 1

    def _drop_unsent(self) -> None:
        """Serve tells nothing of a request that was cancelled before it was sent."""
        now = time.monotonic()
        late = [name for name, choice in self._choices.items() if not choice.is_sent and now > choice.at + _UNSENT_S]
        for request_id in late:
            self._forget_request(request_id)


def _prefixes(request: PendingRequest | None) -> Sequence[Prefix]:
    first = request.args[0] if request is not None and request.args else None
    return first if isinstance(first, list) and first and isinstance(first[0], Prefix) else ()
