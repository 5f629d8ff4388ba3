"""Who gets another chance after a worker has died, and with whom: policy, without any process."""

from __future__ import annotations

import itertools
import random

import pytest

from cppbatch import GenerationRequest
from cppbatch.cluster.flight import Flight
from cppbatch.cluster.in_flight import Replay


@pytest.fixture
async def replay() -> Replay:
    """Of five requests, all sent."""
    replay = Replay()
    for number in range(5):
        replay.add(Flight(number, GenerationRequest(id=f"r{number}", prompt="x")))
    assert numbers(replay.to_send()) == [0, 1, 2, 3, 4]
    return replay


def numbers(flights: list[Flight]) -> list[int]:
    return [flight.number for flight in flights]


async def test_what_is_sent_is_sent_once(replay: Replay) -> None:
    assert replay.to_send() == []
    replay.add(Flight(5, GenerationRequest(id="r5", prompt="x")))
    assert numbers(replay.to_send()) == [5]


async def test_after_one_crash_all_go_on_together(replay: Replay) -> None:
    assert replay.crashed({0, 1, 2}) == []
    assert numbers(replay.to_send()) == [0, 1, 2, 3, 4]


async def test_after_two_in_a_row_each_suspect_goes_on_alone_until_it_gets_a_token(replay: Replay) -> None:
    for _ in range(2):
        replay.crashed({1, 2})
    (first,) = replay.to_send()
    assert first.number == 1
    assert replay.to_send() == []
    assert replay.got_token(first)  # another one is to be tried
    replay.take_back(first, 101)
    (second,) = replay.to_send()
    assert second.number == 2
    assert not replay.got_token(second)  # there is no other: it stays where it is
    assert numbers(replay.to_send()) == [0, 3, 4, 101]


async def test_a_suspect_that_ends_makes_way_for_the_next(replay: Replay) -> None:
    for _ in range(2):
        replay.crashed({1, 2})
    (first,) = replay.to_send()
    replay.ended(first)
    assert numbers(replay.to_send()) == [2]


async def test_a_third_crash_is_the_end_of_the_one_that_was_alone(replay: Replay) -> None:
    for _ in range(2):
        assert replay.crashed({1, 2}) == []
    assert numbers(replay.to_send()) == [1]
    assert numbers(replay.crashed({1})) == [1]
    assert numbers(replay.to_send()) == [2]
    assert sorted(replay.flights) == [0, 2, 3, 4]


async def test_a_token_in_between_starts_the_count_anew(replay: Replay) -> None:
    for _ in range(10):
        assert replay.crashed({0, 1}) == []
        for flight in replay.to_send():
            assert not replay.got_token(flight)


@pytest.mark.parametrize("seed", range(300))
async def test_whoever_kills_workers_fails_and_nobody_else(seed: int) -> None:
    """A made-up worker that runs up to four at once and dies of the poisonous ones, early or late."""
    chance = random.Random(seed)
    replay, fresh_numbers = Replay(), itertools.count(100)
    flights = [Flight(i, GenerationRequest(id=str(i), prompt="x")) for i in range(chance.randint(1, 12))]
    tokens = dict.fromkeys(flights, 0)
    deadly_at = {flight: chance.randint(0, 3) for flight in flights if chance.random() < 0.3}
    for flight in flights:
        replay.add(flight)
    failed: list[Flight] = []
    queue: list[Flight] = []
    for _ in range(5000):
        queue += replay.to_send()
        if not replay.flights:
            break
        assert queue, "nobody is sent, and yet some have not ended"
        running = queue[:4]
        flight = chance.choice(running)
        if deadly_at.get(flight) == tokens[flight]:
            failed += replay.crashed({other.number for other in running})
            queue = []
            continue
        tokens[flight] += 1
        makes_way = replay.got_token(flight)
        if tokens[flight] == 5:
            replay.ended(flight)
            queue.remove(flight)
        elif makes_way:
            replay.take_back(flight, next(fresh_numbers))
            queue.remove(flight)
    assert not replay.flights
    assert set(failed) == set(deadly_at)
