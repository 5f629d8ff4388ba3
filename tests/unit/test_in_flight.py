"""Which requests the next worker gets after a crash: policy, tested without a process."""

from __future__ import annotations

import random

import pytest

from cppbatch import GenerationEvent, GenerationRequest, SamplingParams
from cppbatch.cluster.engines.in_flight import InFlightRequest, InFlightRequests
from cppbatch.cluster.link import Submit, decode_for_worker, encode
from cppbatch.engine.params import replace_fields


@pytest.fixture
async def in_flight() -> InFlightRequests[InFlightRequest]:
    """Five requests, all sent."""
    in_flight = InFlightRequests(InFlightRequest)
    for i in range(5):
        in_flight.add(GenerationRequest(id=f"r{i}", prompt="x"))
    assert numbers(in_flight.take_sendable()) == [0, 1, 2, 3, 4]
    return in_flight


def numbers(requests: list[InFlightRequest]) -> list[int]:
    return [int(request.id) for request in requests]


async def test_a_request_is_sent_once(in_flight: InFlightRequests[InFlightRequest]) -> None:
    assert in_flight.take_sendable() == []
    added = in_flight.add(GenerationRequest(id="r5", prompt="x"))
    assert not in_flight.is_sent(added)
    assert in_flight.take_sendable() == [added]
    assert in_flight.is_sent(added)


async def test_a_worker_gets_a_request_as_its_client_made_it_and_does_not_check_it_again() -> None:
    params = SamplingParams(stop=["a"], guided_choice=["b", "c"], samplers=["top_k"], logit_bias={5: 1.0, "d": 2})
    request = GenerationRequest(id="x", prompt=[1, 2], params=params, lora={0: 0.5, "e": 1})
    sent = InFlightRequests(InFlightRequest).add(replace_fields(request, priority=1000)).message()
    assert isinstance(sent, Submit)
    received = decode_for_worker(encode(sent))
    assert isinstance(received, Submit)
    for its, other in ((received.request, sent.request), (received.request.params, sent.request.params)):
        names = [name for name in other.__struct_fields__ if name != "params"]
        assert [getattr(its, name) for name in names] == [getattr(other, name) for name in names]


async def test_after_one_crash_all_requests_are_resent_together(in_flight: InFlightRequests[InFlightRequest]) -> None:
    assert in_flight.worker_died({0, 1, 2}) == []
    assert numbers(in_flight.take_sendable()) == [0, 1, 2, 3, 4]


async def test_after_two_crashes_in_a_row_each_suspect_runs_alone_until_its_next_token(
    in_flight: InFlightRequests[InFlightRequest],
) -> None:
    for _ in range(2):
        in_flight.worker_died({1, 2})
    (first,) = in_flight.take_sendable()
    assert first.id == "1"
    assert in_flight.take_sendable() == []
    assert in_flight.token_received(first)  # another suspect waits
    in_flight.requeue(first)
    assert first.id == "5"
    (second,) = in_flight.take_sendable()
    assert second.id == "2"
    assert not in_flight.token_received(second)  # no other suspect: it stays in the worker
    assert numbers(in_flight.take_sendable()) == [0, 3, 4, 5]


async def test_events_for_the_old_id_of_a_requeued_request_have_no_reader(
    in_flight: InFlightRequests[InFlightRequest],
) -> None:
    request = in_flight.get("1")
    assert request
    in_flight.requeue(request)
    assert in_flight.get("1") is None
    assert in_flight.get(request.id) is request
    assert request in in_flight
    assert len(in_flight) == 5


async def test_after_a_suspect_ends_the_next_one_runs(in_flight: InFlightRequests[InFlightRequest]) -> None:
    for _ in range(2):
        in_flight.worker_died({1, 2})
    (first,) = in_flight.take_sendable()
    in_flight.remove(first)
    assert numbers(in_flight.take_sendable()) == [2]


async def test_a_third_crash_convicts_the_suspect_that_ran_alone(in_flight: InFlightRequests[InFlightRequest]) -> None:
    for _ in range(2):
        assert in_flight.worker_died({1, 2}) == []
    assert numbers(in_flight.take_sendable()) == [1]
    assert numbers(in_flight.worker_died({1})) == [1]
    assert numbers(in_flight.take_sendable()) == [2]
    assert sorted(int(request.id) for request in in_flight) == [0, 2, 3, 4]


async def test_a_token_between_two_crashes_resets_the_count(in_flight: InFlightRequests[InFlightRequest]) -> None:
    for _ in range(10):
        assert in_flight.worker_died({0, 1}) == []
        for request in in_flight.take_sendable():
            assert not in_flight.token_received(request)


@pytest.mark.parametrize("seed", range(300))
async def test_exactly_the_requests_that_crash_workers_fail(seed: int) -> None:
    """A simulated worker that runs up to four requests at once and dies of the poison requests, early or late."""
    chance = random.Random(seed)
    in_flight = InFlightRequests(InFlightRequest)
    requests = [in_flight.add(GenerationRequest(id=str(i), prompt="x")) for i in range(chance.randint(1, 12))]
    n_tokens = dict.fromkeys(requests, 0)
    deadly_at = {request: chance.randint(0, 3) for request in requests if chance.random() < 0.3}
    failed: list[InFlightRequest] = []
    queue: list[InFlightRequest] = []
    for _ in range(5000):
        queue += in_flight.take_sendable()
        if not in_flight:
            break
        assert queue, "no request is sent, but some have not ended"
        running = queue[:4]
        request = chance.choice(running)
        if deadly_at.get(request) == n_tokens[request]:
            failed += in_flight.worker_died({int(other.id) for other in running})
            queue = []
            continue
        n_tokens[request] += 1
        makes_way = in_flight.token_received(request)
        if n_tokens[request] == 5:
            in_flight.remove(request)
            queue.remove(request)
        elif makes_way:
            in_flight.requeue(request)
            queue.remove(request)
    assert not in_flight
    assert set(failed) == set(deadly_at)


def test_a_request_is_untouched_until_its_first_event_or_a_crash() -> None:
    requests = InFlightRequests(InFlightRequest)
    fresh, reported, crashed = (requests.add(GenerationRequest(id=name, prompt=name)) for name in "abc")
    requests.take_sendable()
    reported.put(GenerationEvent(request_id="b", text="x", tokens=[1]))
    requests.worker_died({int(crashed.id)})
    assert [each.is_untouched for each in (fresh, reported, crashed)] == [True, False, False]
