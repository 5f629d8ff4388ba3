"""The request router alone: replicas are not started, Serve's calls to the router are made here."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")

from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata
from ray.serve.request_router import PendingRequest

from cppbatch import GenerationRequest
from cppbatch.cluster.prefix_router import prompt_prefixes
from cppbatch.ray.replica.deployment import PrefixRequestRouter

WORDS = "All of them begin with these words, which are worth reading only once. " * 40
DEPLOYMENT = DeploymentID("engine", "cppbatch")


def replica(name: str) -> Any:
    return SimpleNamespace(replica_id=ReplicaID(name, DEPLOYMENT), max_ongoing_requests=64)


def call(number: int, prompt: str = "") -> PendingRequest:
    prefixes = prompt_prefixes(GenerationRequest(id="r", prompt=prompt or str(number)))
    metadata = RequestMetadata(request_id=f"r{number}", internal_request_id=f"i{number}")
    return PendingRequest(args=[prefixes, b"message"], kwargs={}, metadata=metadata)


class Routing:
    """A router with replicas a, b and c."""

    def __init__(self) -> None:
        self.router = PrefixRequestRouter(DEPLOYMENT, DeploymentHandleSource.REPLICA, use_replica_queue_len_cache=True)
        self.router.initialize_state(n_parallel=16)
        self.replicas = [replica(name) for name in "abc"]
        self.router._replicas = {each.replica_id: each for each in self.replicas}

    async def choose(self, request: PendingRequest) -> str:
        ranks = await self.router.choose_replicas(self.replicas, request)
        assert sorted(each.replica_id.unique_id for rank in ranks for each in rank) == ["a", "b", "c"]
        (first,) = ranks[0]
        return str(first.replica_id.unique_id)

    async def send(self, request: PendingRequest) -> str:
        chosen = await self.choose(request)
        self.router.on_request_routed(request, ReplicaID(chosen, DEPLOYMENT), None)
        return chosen

    def complete(self, number: int, where: str) -> None:
        self.router.on_request_completed(ReplicaID(where, DEPLOYMENT), f"i{number}")


@pytest.fixture
async def routing() -> Routing:
    return Routing()


async def test_a_burst_is_spread_although_none_of_it_has_been_sent(routing: Routing) -> None:
    assert [await routing.choose(call(i)) for i in range(6)] == ["a", "b", "c", "a", "b", "c"]


async def test_a_request_follows_its_prefix_until_that_queue_is_longer_by_a_margin(routing: Routing) -> None:
    assert await routing.send(call(0)) == "a"
    assert [await routing.send(call(i, WORDS + str(i))) for i in range(1, 7)] == ["b"] * 5 + ["c"]


async def test_an_ended_request_does_not_count(routing: Routing) -> None:
    assert [await routing.send(call(i)) for i in range(3)] == ["a", "b", "c"]
    routing.complete(1, "b")
    assert await routing.choose(call(3)) == "b"


async def test_requests_of_other_handles_count_as_serve_reports_them(routing: Routing) -> None:
    routing.router.on_new_queue_len_info(routing.replicas[0].replica_id, 2)
    assert [await routing.choose(call(i)) for i in range(4)] == ["b", "c", "b", "c"]


async def test_a_request_that_another_replica_took_counts_there(routing: Routing) -> None:
    request = call(0, WORDS)
    assert await routing.choose(request) == "a"
    routing.router.on_request_routed(request, routing.replicas[2].replica_id, None)  # a was full
    assert await routing.choose(call(1, WORDS)) == "c"


async def test_a_request_that_was_cancelled_before_it_was_sent_is_dropped(
    routing: Routing, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    # Of the class, not of the module by its name: Ray may have imported that again.
    monkeypatch.setitem(PrefixRequestRouter._drop_unsent.__globals__, "time", SimpleNamespace(monotonic=lambda: now))
    assert await routing.choose(call(0)) == "a"
    now = 11.0
    assert await routing.choose(call(1)) == "a"


async def test_a_lost_replica_has_no_prefixes(routing: Routing) -> None:
    await routing.send(call(0, WORDS))
    router = routing.router
    router.update_replicas(routing.replicas[1:])
    await asyncio.sleep(0)
    assert not router._router._prefixes


async def test_a_call_without_a_prompt_goes_where_the_fewest_requests_are(routing: Routing) -> None:
    await routing.send(call(0, WORDS))
    metadata = RequestMetadata(request_id="r", internal_request_id="i")
    some_args: list[list[Any]] = [[], [b"message"], [[]]]
    for args in some_args:
        assert await routing.choose(PendingRequest(args=args, kwargs={}, metadata=metadata)) == "b"
