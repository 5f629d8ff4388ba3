"""What an engine says it does now: every cell with its holders, every sequence in its state, and no text."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import msgspec

from cppbatch import BatchInferenceEngine, GenerationRequest
from cppbatch.config import Sharing
from cppbatch.engine.observe.live_state import MAX_QUEUE, LiveCells
from cppbatch.engine.sequence import SeqStatus
from tests.support.fakes import FakeProposer, context_of, drain, fake_engine, greedy, run_steps
from tests.support.randomised import randomised
from tests.unit.test_live_types import check_cells
from tests.unit.test_random_schedules import (
    ACTIONS,
    ADAPTERS,
    MEMORIES,
    N_BATCH,
    N_CTX,
    N_PARALLEL,
    SWITCHING,
    Action,
    Run,
    small_scale,  # noqa: F401  # a fixture
)

Holders = tuple[frozenset[int], int]
"""The seq_ids of running sequences, and the number of cached prefixes."""


def held_cells(engine: BatchInferenceEngine) -> Counter[Holders]:
    """How many cells of the context each set of holders has, by the numbers of the cells themselves."""
    owned = context_of(engine).owned
    prefixes = [prefix.seq_id for prefix in engine.core.kv.cache.in_cells]
    numbers = set().union(*owned)
    return Counter(
        (
            frozenset(seq_id for seq_id in engine.core.kv.running if number in owned[seq_id]),
            sum(number in owned[seq_id] for seq_id in prefixes),
        )
        for number in numbers
    )


def shown_cells(cells: LiveCells) -> Counter[Holders]:
    counted: Counter[Holders] = Counter()
    for segment in cells.segments:
        counted[frozenset(segment.sequences), segment.prefixes] += segment.tokens
    return counted


@dataclass
class LiveRun(Run):
    """Looks at the live state after every action."""

    def check_accounting(self) -> None:
        super().check_accounting()
        live, engine = self.engine.live(), self.engine
        check_cells(live.cells)
        assert shown_cells(live.cells) == held_cells(engine)
        assert (live.cells.used, live.cells.cached) == (engine.core.kv.n_used, engine.core.kv.n_cached)
        at = dict.fromkeys(engine.core.kv.running, 0)
        for segment in live.cells.segments:
            for seq_id in segment.sequences:
                assert segment.start == at[seq_id]
                at[seq_id] += segment.tokens
        assert at == {row.seq_id: row.computed_tokens for row in live.rows if row.seq_id is not None}
        waiting = [*live.queue, *(row for row in live.rows if row.state == "swapped")]
        assert sorted(each.number for each in waiting) == sorted(each.rank[1] for each in engine.core.scheduler.waiting)
        assert live.waiting == len(live.queue)


@randomised(ring=25, nightly=100, soak=300, actions=ACTIONS, memory=MEMORIES)
def test_in_any_schedule_the_segments_are_the_cells_and_their_holders(
    actions: list[Action], memory: tuple[bool, Sharing]
) -> None:
    unified, sharing = memory
    sizes: dict[str, Any] = {"n_ctx": N_CTX, "n_batch": N_BATCH, "n_parallel": N_PARALLEL}
    sizes |= {"swap_space": 2, "prefix_cache_ram": 2, "proposers": [FakeProposer()]}
    run_all(LiveRun(fake_engine(unified=unified, sharing=sharing, adapters=ADAPTERS, **sizes)), actions)


@randomised(ring=15, nightly=50, soak=100, actions=SWITCHING)
def test_after_a_switch_of_the_layout_too(actions: list[Action]) -> None:
    sizes: dict[str, Any] = {"n_ctx": N_CTX, "n_batch": N_BATCH, "n_parallel": N_PARALLEL}
    run_all(LiveRun(fake_engine(sharing="cells", switches=True, adapters=ADAPTERS, **sizes)), actions)


def run_all(run: LiveRun, actions: list[Action]) -> None:
    for action in actions:
        run.do(action)
    run.drain()
    assert run.engine.live().rows == []


def test_a_prompt_of_16_sequences_is_one_segment_with_16_holders() -> None:
    engine = fake_engine(n_ctx=1024, n_batch=256, n_parallel=16, sharing="cells")
    for i in range(16):
        engine.add_request([1] * 40 + [2 + i], greedy(20, ignore_eos=True))
    run_steps(engine, 6)
    live = engine.live()
    assert [row.state for row in live.rows] == ["decode"] * 16
    (shared,) = (segment for segment in live.cells.segments if len(segment.sequences) == 16)
    assert (shared.start, shared.tokens, shared.cached) == (0, 40, False)
    assert sum(row.computed_tokens for row in live.rows) - live.cells.used == 15 * 40


def test_a_prefill_shows_its_progress_and_the_queue_its_order_and_length() -> None:
    engine = fake_engine(n_ctx=64, n_batch=8, n_parallel=1)
    engine.add_request([1] * 30, greedy(5))
    for i in range(MAX_QUEUE + 20):
        engine.add_request([2] * 3, greedy(5), priority=1 + i % 2)
    engine.step()
    live = engine.live()
    (row,) = live.rows
    assert (row.state, row.seq_id, row.computed_tokens, row.prompt_tokens, row.max_tokens) == ("prefill", 0, 8, 30, 5)
    assert (live.waiting, len(live.queue)) == (MAX_QUEUE + 20, MAX_QUEUE)
    ranks = [each.rank for each in live.queue]
    assert ranks == sorted(ranks, key=float)  # type: ignore[arg-type]
    assert {each.state for each in live.queue} == {"waiting"}
    assert {each.seq_id for each in live.queue} == {None}
    assert [each.priority for each in live.queue[:60]] == [1] * 60


def test_the_queue_is_in_the_order_of_its_ranks_also_for_a_client_with_many_requests() -> None:
    engine = fake_engine(n_ctx=64, n_batch=8, n_parallel=1)
    for i, client in enumerate(("busy", "busy", "other") * 3):
        request = GenerationRequest(id=str(i), prompt=[2] * 3, params=greedy(5), client=client)
        engine.core.add(engine.core.make_sequence(request))
    ranks = [each.rank for each in engine.live().queue]
    assert ranks == sorted(ranks, key=float)  # type: ignore[arg-type]
    assert len(ranks) == 9


def test_a_swapped_sequence_is_a_row_without_a_seq_id() -> None:
    engine = fake_engine(n_ctx=40, n_batch=32, n_parallel=2)
    for _ in range(2):
        engine.add_request([1] * 12, greedy(20, ignore_eos=True))
    while not any(each.status is SeqStatus.SWAPPED for each in engine.core.scheduler.waiting):
        engine.step()
    live = engine.live()
    assert [(row.state, row.seq_id is None) for row in live.rows] == [("decode", False), ("swapped", True)]
    assert (live.waiting, live.queue) == (0, [])
    assert live.cells.swapped_bytes > 0
    drain(engine)


def test_snapshots_contain_neither_the_text_nor_the_id_of_a_request() -> None:
    engine = fake_engine(n_parallel=2)
    engine.add_request("hello", greedy(20), request_id="SECRET-NAME", cache_salt="SECRET-SALT")
    engine.add_request("hello", greedy(20), request_id="SECRET-TOO", cache_salt="SECRET-SALT")
    engine.add_request("hello", greedy(20), request_id="SECRET-QUEUED")
    engine.step()
    sent = msgspec.json.encode(engine.live())
    assert b"SECRET" not in sent
    assert b"hello" not in sent
    texts = {value for row in engine.live().rows for value in msgspec.structs.astuple(row) if isinstance(value, str)}
    assert texts <= {"prefill", "decode", "swapped", "waiting"}


def test_the_counters_count_what_the_stats_count() -> None:
    engine = fake_engine(proposers=[FakeProposer()])
    for i in range(6):
        engine.add_request([1, 2, i], greedy(12))
    drain(engine)
    live, stats = engine.live().counters, engine.stats()
    for name in live.__struct_fields__:
        assert getattr(live, name) == getattr(stats, name)
    assert live.drafted_tokens > 0
