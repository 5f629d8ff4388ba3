"""A front's requests that replicas run: the messages of each stream group in order, and whom the end of a replica
concerns."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterator

from cppbatch.cluster.engines.in_flight import InFlightRequest
from cppbatch.engine.request import GenerationRequest
from cppbatch.ray.messages import GroupEvents
from cppbatch.ray.replica.set import ReplicaLost

_MAX_GROUPS = 4096  # more than a cluster has replicas at once


class SentRequest(InFlightRequest):
    """An unfinished request of a front. It has another `id` each time it is sent."""

    def __init__(self, request: GenerationRequest) -> None:
        super().__init__("", request)
        self.group: SentGroup | None = None
        """The group that carries its events; None until a replica runs it."""


class SentStream:
    """A stream of a request that was sent. The request may be sent again before the stream has ended."""

    def __init__(self, request: SentRequest) -> None:
        self.request = request
        self.sent_as = request.id
        self.group: SentGroup | None = None
        """None until the replica has opened the stream."""


class SentGroup:
    """The front's side of a stream group. A stream that breaks may take messages with it: then the group has a hole,
    and none of its later messages may be used."""

    def __init__(self, replica: str) -> None:
        self.replica = replica
        self.is_lost = False
        self.streams: dict[str, asyncio.Task[None]] = {}
        """The tasks that read the open streams, by the id of the stream's request."""
        self.requests: dict[str, SentRequest] = {}
        """The unfinished requests of the group, by the id that the replica knows."""
        self._n_received = 0
        self._early: dict[int, GroupEvents] = {}  # overtook a message on the stream of an earlier carrier

    def in_order(self, message: GroupEvents) -> Iterator[GroupEvents]:
        """Yields this message and those that waited for it; nothing if it must wait for another one. Raises
        `ReplicaLost` for a number that was used before: the replica has begun the group again."""
        if message.number < self._n_received:
            raise ReplicaLost("it no longer knows the requests")
        self._early[message.number] = message
        while not self.is_lost and (following := self._early.pop(self._n_received, None)):
            self._n_received += 1
            yield following


class SentGroups:
    """The stream groups by name. A group without open streams is kept: its next message may already be on the way."""

    def __init__(self) -> None:
        self._groups: OrderedDict[str, SentGroup] = OrderedDict()

    def __iter__(self) -> Iterator[SentGroup]:
        """Iterates over a copy."""
        return iter(list(self._groups.values()))

    def get(self, name: str, replica: str) -> SentGroup:
        """The group of this name."""
        group = self._groups.setdefault(name, SentGroup(replica))
        self._groups.move_to_end(name)
        while len(self._groups) > _MAX_GROUPS:
            self._groups.popitem(last=False)
        return group
