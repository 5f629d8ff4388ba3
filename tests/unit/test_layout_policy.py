"""When the layout is switched: at once for a request without a place, and otherwise seldom."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from cppbatch.config import KvLayout
from cppbatch.engine.kv.layout_policy import LayoutPolicy, LayoutSwitch, layout_cost_ratio, shared_tokens
from cppbatch.engine.request import GenerationRequest
from cppbatch.engine.sequence import Seq

STREAM = 2048
N_CACHED = 2048
STEP_S = 0.03


def sequence(tokens: Sequence[int], **options: Any) -> Seq:
    request = GenerationRequest(id="its-id", prompt=[], **options)
    return Seq(request, np.array(tokens, np.int32), max_new=9, seed=0, now=0.0)


def distinct(n: int, length: int) -> list[Seq]:
    return [sequence([100 * (i + 1)] * length) for i in range(n)]


def sharing(n: int, prefix: int, own: int) -> list[Seq]:
    return [sequence([7] * prefix + [100 * (i + 1)] * own) for i in range(n)]


CHAT = distinct(16, 300)
LONG = distinct(15, 300) + distinct(1, 3000)
SHARED = sharing(16, 1500, 36)


class Engine:
    """A clock and the policy of an engine, which follows its decisions; a switch takes `cost` seconds."""

    def __init__(
        self, layout: KvLayout = "per-sequence", *, cost: float = 0.1, n_cached: int | None = N_CACHED
    ) -> None:
        self.policy = LayoutPolicy(STREAM, n_cached)
        self.layout = layout
        self.cost = cost
        self.now = 1000.0
        self.switches: list[tuple[float, LayoutSwitch]] = []

    def step(self, running: Sequence[Seq] = CHAT, waiting: Sequence[Seq] = (), blocked: Seq | None = None) -> KvLayout:
        """One step. The layout in which it is computed."""
        if switch := self.policy.choose_switch(self.now, self.layout, running, waiting, blocked):
            self.now += self.cost
            self.layout = switch.layout
            self.policy.switched(switch.layout, self.now, self.cost)
            self.switches.append((self.now, switch))
        self.now += STEP_S
        return self.layout

    def run(self, seconds: float, running: Sequence[Seq], waiting: Sequence[Seq] = ()) -> KvLayout:
        end = self.now + seconds
        while self.now < end:
            self.step(running, waiting)
        return self.layout


def test_a_sequence_that_fills_its_stream_stays_and_one_that_outgrows_it_is_given_all_cells_at_once() -> None:
    engine = Engine()
    assert engine.step(distinct(15, 100) + distinct(1, STREAM)) == "per-sequence"
    assert engine.step(distinct(15, 100) + distinct(1, STREAM + 1)) == "unified"
    assert engine.switches[0][1].reason == "its-id has 2049 tokens, but a stream has 2048 cells"


def test_a_request_without_a_place_is_given_one_at_once_however_short_ago_the_last_switch_was() -> None:
    engine = Engine()
    assert engine.step(blocked=sequence([1] * 3000)) == "unified"
    engine.layout = "per-sequence"
    engine.policy.switched("per-sequence", engine.now, 0.1)
    assert engine.step(blocked=sequence([1] * 3000)) == "unified"


def test_a_long_request_in_the_queue_waits_for_its_turn_in_the_current_layout() -> None:
    assert Engine().run(60, CHAT, waiting=[sequence([1] * 3000)]) == "per-sequence"


@pytest.mark.parametrize(
    ("load", "layout"),
    [  # measured with 16 sequences: docs/decisions/0006
        (distinct(16, 132), "per-sequence"),
        (sharing(16, 580, 36), "per-sequence"),
        (sharing(16, 1500, 36), "unified"),
    ],
)
def test_each_load_gets_the_layout_in_which_it_is_faster(load: list[Seq], layout: KvLayout) -> None:
    for before, start in ((CHAT, "per-sequence"), (SHARED, "unified")):
        engine = Engine()
        assert engine.run(60, before) == start
        n_before, began = len(engine.switches), engine.now
        assert engine.run(90, load) == layout
        if start == layout:
            assert len(engine.switches) == n_before
        else:
            [(when, _)] = engine.switches[n_before:]
            assert when < began + 20


def test_where_cells_cannot_be_shared_a_shared_prefix_does_not_cause_a_switch() -> None:
    assert Engine(n_cached=None).run(60, SHARED) == "per-sequence"
    assert Engine("unified", n_cached=None).run(60, SHARED) == "per-sequence"


def test_between_the_measured_loads_the_layout_stays() -> None:
    for before in (CHAT, SHARED):
        engine = Engine()
        start = engine.run(60, before)
        assert engine.run(300, sharing(16, 900, 36)) == start


def test_a_burst_of_two_seconds_does_not_cause_a_switch() -> None:
    engine = Engine()
    for _ in range(20):
        engine.run(2, SHARED)
        engine.run(20, CHAT)
    assert not engine.switches


def test_an_engine_that_has_computed_for_a_second_has_too_little_data() -> None:
    engine = Engine()
    for _ in range(4):
        engine.run(0.5, SHARED)
        engine.now += 60
    assert not engine.switches


def test_after_a_long_request_the_streams_come_back_but_not_at_once() -> None:
    engine = Engine()
    engine.run(5, LONG)
    ended = engine.now
    assert engine.run(8, CHAT) == "unified"
    assert engine.run(20, CHAT) == "per-sequence"
    when, _ = engine.switches[-1]
    assert when - ended >= 10


def test_the_streams_do_not_come_back_while_a_sequence_hardly_fits_or_a_long_one_waits() -> None:
    for load, waiting in ((distinct(15, 300) + distinct(1, 1900), []), (CHAT, distinct(100, 30) + distinct(1, 3000))):
        engine = Engine("unified")
        assert engine.run(60, load, waiting) == "unified"
        assert engine.run(60, CHAT) == "per-sequence"


def test_the_streams_come_back_when_prefixes_are_not_shared_any_more() -> None:
    engine = Engine()
    assert engine.run(60, SHARED) == "unified"
    assert engine.run(40, CHAT) == "per-sequence"


@pytest.mark.parametrize("cost", [0.5, *(pytest.param(cost, marks=pytest.mark.nightly) for cost in (0.05, 5.0))])
def test_of_an_hour_of_mixed_requests_switching_takes_little(cost: float) -> None:
    engine, draw = Engine(cost=cost), random.Random(1)
    end = engine.now + 3600
    while engine.now < end:
        load = draw.choice([CHAT, CHAT, SHARED, LONG])
        engine.run(draw.expovariate(1 / draw.choice([1, 5, 30])), load)
    assert len(engine.switches) * cost < 0.04 * 3600
    assert len(engine.switches) < 200


def test_long_requests_that_come_again_and_again_keep_the_engine_unified() -> None:
    engine = Engine()
    for _ in range(200):
        engine.run(2, LONG)
        engine.run(14, CHAT)
    assert len(engine.switches) < 12


def test_long_requests_that_come_seldom_leave_the_time_between_to_streams() -> None:
    engine, in_streams = Engine(), 0.0
    for _ in range(30):
        engine.run(5, LONG)
        engine.run(30, CHAT)
        before = engine.now
        engine.run(100, CHAT)
        in_streams += (engine.now - before) * (engine.layout == "per-sequence")
    assert in_streams > 0.9 * 30 * 100


def test_shared_tokens_are_those_held_more_than_once() -> None:
    a, b, c = [1] * 10, [1] * 10 + [2] * 5, [1] * 10 + [2] * 3 + [3] * 9
    assert shared_tokens([sequence(tokens) for tokens in (c, [5] * 8, a, b)]) == 10 + 13
    assert shared_tokens([sequence(a), sequence(a)]) == 10
    assert shared_tokens([]) == 0


def test_tokens_that_may_not_be_shared_do_not_count() -> None:
    tokens = [1] * 10
    assert shared_tokens([sequence(tokens), sequence(tokens, cache_salt="other")]) == 0
    assert shared_tokens([sequence(tokens), sequence(tokens, cache_prompt=False)]) == 0


def test_shared_tokens_are_the_nodes_that_a_tree_saves() -> None:
    draw = random.Random(3)
    for _ in range(300):
        texts = [[draw.choice([1, 256, 2**24]) for _ in range(draw.randrange(1, 9))] for _ in range(draw.randrange(9))]
        nodes = {tuple(text[:n]) for text in texts for n in range(1, len(text) + 1)}
        assert shared_tokens([sequence(text) for text in texts]) == sum(map(len, texts)) - len(nodes)


def test_repeated_cells_are_weighed_against_those_that_each_row_passes_over() -> None:
    each = [sequence([1] * 10 + [i] * 2) for i in (2, 3, 4)]
    assert layout_cost_ratio(each, 5) == 20 / (3 * (36 - 20 + 5) - 36)
    assert layout_cost_ratio(each[:1], 0) == 0
