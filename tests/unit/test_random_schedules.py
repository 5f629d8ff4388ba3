"""Thousands of random schedules of arrivals, ends and cancels: every request gets its own text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import strategies as st

from cppbatch import BatchInferenceEngine, FinishReason, GenerationEvent, SamplingParams
from cppbatch.config import KvLayout, Sharing
from cppbatch.engine import core as core_module
from cppbatch.engine import input_processor, step_shape
from cppbatch.engine.kv import checkpoints
from cppbatch.engine.kv.layout_policy import LayoutSwitch
from cppbatch.engine.kv.prefix_cache import ReuseCosts
from cppbatch.engine.lora_sets import AdapterSet, adapter_set
from cppbatch.engine.model_info import AdapterInfo
from cppbatch.engine.speculation import speculator
from cppbatch.errors import DecodeFailed
from tests.support.fake_heads import CONTEXTS, check_head, fake_head
from tests.support.fakes import EOG, FakeProposer, context_of, fake_engine, greedy, reference, text_of
from tests.support.randomised import randomised
from tests.support.virtual_time import Clock

N_CTX, N_PARALLEL, N_BATCH = 48, 3, 6
LONGEST = N_CTX // N_PARALLEL  # fits in both layouts
COSTS = ReuseCosts(share=1, copy=2, min_cached=2, worth_waiting=3)


CLOCK = Clock(tick=0.001)


@pytest.fixture(autouse=True, scope="module")
def small_scale() -> Iterator[None]:
    """A clock of our own, and thresholds that fit caches of 48 cells."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core_module, "perf_counter", CLOCK)
        patch.setattr(input_processor, "perf_counter", CLOCK)
        patch.setattr(step_shape, "_GAP_STEPS", 1)
        patch.setattr(step_shape, "_MAX_GAIN_STEPS", 1000)
        patch.setattr(checkpoints, "_MIN_STEP_TOKENS", 1)
        patch.setattr(checkpoints, "_CLOSE_MARKERS_TOKENS", 1)
        patch.setattr(checkpoints, "_HEADER_TOKENS", 3)
        patch.setattr(checkpoints, "_BEFORE_END", (1, 3, 6))
        patch.setattr(checkpoints, "_UNMARKED_STEP_TOKENS", 5)
        yield


@dataclass(frozen=True)
class Arrive:
    prompt: list[int]
    params: SamplingParams
    options: dict[str, Any]

    @property
    def adapters(self) -> AdapterSet:
        return adapter_set(self.options["lora"], ADAPTERS)


@dataclass(frozen=True)
class Cancel:
    which: int


@dataclass(frozen=True)
class Step:
    pass


@dataclass(frozen=True)
class Wait:
    seconds: int


@dataclass(frozen=True)
class ClearCache:
    pass


@dataclass(frozen=True)
class SwitchLayout:
    """Whatever the policy thinks: it may have to switch back at once."""


Action = Arrive | Cancel | Step | Wait | ClearCache | SwitchLayout

HOST_MEMORY = st.sampled_from((0, 1, 2, 1024))
"""No swapping, room for one or two sequences, room for all; in a cache of few cells, so that it happens."""

MEMORIES: st.SearchStrategy[tuple[bool, Sharing]] = st.sampled_from(
    ((True, "cells"), (True, "cells"), (True, "checkpoints"), (True, "checkpoints"), (True, "whole"), (True, "none"),
     (False, "copy"), (False, "copy"), (False, "checkpoints"), (False, "whole"), (False, "none"))
)  # fmt: skip
"""Unified or not, and how prefixes are shared there."""

BEGINNINGS = (b"", b"", b"\1" * 5, b"\1" * 5 + b"\2" * 4, b"\1" * 5 + b"\3", b"\4\5\6\7\x08\x09")

ADAPTERS = (AdapterInfo(name="x", path="", scale=1), AdapterInfo(name="y", path="", scale=0))
LORAS: tuple[dict[str | int, float] | None, ...] = (None, None, None, None, {}, {"x": 0.5}, {"y": 1, "x": 1})

STOPS = ((), (), ("a",), ("ab", "b "), ("aab", "ba"), ("é",), ("🙂", "bé"))
STOP_TOKENS = ((), (), tuple(range(8)), (33, 42, 60))


@st.composite
def arrivals(draw: st.DrawFn, longest: int = LONGEST) -> Arrive:
    beginning = draw(st.sampled_from(BEGINNINGS))
    prompt = beginning + draw(st.binary(min_size=1, max_size=longest - 1 - len(beginning)))
    max_tokens = draw(st.integers(1, longest - len(prompt)))
    params = greedy(
        max_tokens,
        stop=draw(st.sampled_from(STOPS)),
        stop_token_ids=draw(st.sampled_from(STOP_TOKENS)),
        ignore_eos=draw(st.booleans()),
        min_tokens=draw(st.just(0) | st.integers(0, max_tokens)),
    )
    options: dict[str, Any] = {
        "priority": draw(st.sampled_from((0, 0, 0, 1, -1, 100))),
        "timeout": draw(st.sampled_from((None, None, None, None, 30))),
        "queue_timeout": draw(st.sampled_from((None, None, None, 0, 15))),
        "cache_prompt": draw(st.sampled_from((True, True, True, False))),
        "cache_salt": draw(st.sampled_from(("", "", "", "a"))),
        "lora": draw(st.sampled_from(LORAS)),
    }
    return Arrive([byte % min(EOG) for byte in prompt], params, options)


OTHERS = st.integers(1, 6).map(Cancel) | st.integers(1, 20).map(Wait) | st.just(ClearCache())
ACTIONS = st.lists(
    st.one_of(arrivals(), arrivals(), st.just(Step()), st.just(Step()), OTHERS),
    min_size=4,
    max_size=20,
)


@dataclass
class Run:
    """An engine, its requests and its events."""

    engine: BatchInferenceEngine
    asked: dict[str, Arrive] = field(default_factory=dict)
    events: list[GenerationEvent] = field(default_factory=list)

    def do(self, action: Action) -> None:
        match action:
            case Arrive(prompt, params, options):
                self.asked[self.engine.add_request(prompt, params, **options)] = action
            case Cancel(which):
                self.engine.cancel(f"request-{which}")
            case Step():
                self.events += self.engine.step()
            case Wait(seconds):
                CLOCK.now += seconds
            case ClearCache():
                self.engine.clear_prefix_cache()
            case SwitchLayout():
                policy = self.engine.core._layout_policy
                assert policy
                other: KvLayout = "per-sequence" if self.engine.core.kv.unified else "unified"
                self.engine.core._switch_layout(policy, LayoutSwitch(other, "by chance"))
        self.check_accounting()

    def drain(self) -> None:
        for _ in range(1000):
            if not self.engine.has_work:
                return
            self.do(Step())
        raise AssertionError("the engine never comes to rest")

    def check_accounting(self) -> None:
        self.engine.core.kv.check()
        if head := self.engine.core.runtime.head:
            check_head(head)
        assert context_of(self.engine).n_used == self.engine.core.kv.n_used + self.engine.core.kv.n_cached

    def check_all_is_free(self) -> None:
        stats = self.engine.stats()
        assert (stats.kv_cells_used, stats.swapped_bytes, stats.running, stats.waiting) == (0, 0, 0, 0)
        self.engine.clear_prefix_cache()
        stats = self.engine.stats()
        assert (stats.kv_cells_cached, stats.prefix_cache_bytes) == (0, 0)
        assert stats.seq_ids_free == stats.seq_ids
        assert context_of(self.engine).n_used == 0

    def check_every_answer(self) -> None:
        ended = Counter(event.request_id for event in self.events if event.finish_reason)
        assert ended == Counter(self.asked.keys()), "not exactly one terminal event for each request"
        for request_id, arrival in self.asked.items():
            check_answer(arrival, [event for event in self.events if event.request_id == request_id])


def check_answer(arrival: Arrive, events: list[GenerationEvent]) -> None:
    tokens = [token for event in events for token in event.tokens]
    text = "".join(event.text for event in events)
    expected_tokens, expected_text, expected_reason = reference(arrival.prompt, arrival.params, arrival.adapters)
    reason, usage = events[-1].finish_reason, events[-1].usage
    if reason in (FinishReason.CANCELLED, FinishReason.ERROR, FinishReason.TIMEOUT):
        assert tokens == expected_tokens[: len(tokens)]
        assert text == text_of(tokens)
    else:
        assert (tokens, text, reason) == (expected_tokens, expected_text, expected_reason)
    assert usage is not None
    n_end_tokens = usage.completion_tokens - len(tokens)
    assert usage.prompt_tokens == len(arrival.prompt)
    assert n_end_tokens == 0 or (n_end_tokens == 1 and reason is FinishReason.STOP)


SIZES = st.fixed_dictionaries(
    {
        "n_more_ids": st.sampled_from((0, 1, 4)),
        "swap_space": HOST_MEMORY,
        "prefix_cache_ram": HOST_MEMORY,
        "may_pad": st.booleans(),
        "on_gpu": st.booleans(),
        "drafts": st.sampled_from(("", "lookup", "mtp", "eagle3", "dflash", "both")),
        "keeps": st.sampled_from((0, 0, 3)),
    }
)

ANY_SCHEDULE: dict[str, st.SearchStrategy[Any]] = {
    "actions": ACTIONS, "memory": MEMORIES, "n_ctx": st.sampled_from((LONGEST, 20, 30, N_CTX)), "sizes": SIZES,
}  # fmt: skip


@randomised(ring=70, nightly=200, soak=20_000, **ANY_SCHEDULE)
def test_in_any_schedule_every_request_gets_the_text_it_gets_alone(**schedule: Any) -> None:
    run_and_check(**schedule)


@randomised(ring=50, nightly=150, soak=1000, **ANY_SCHEDULE)
def test_whenever_the_draft_head_is_asked_every_request_gets_the_text_it_gets_alone(**schedule: Any) -> None:
    """Whether its drafts pay or not: it is asked in every step without prompts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speculator, "_MIN_GAIN", 0.0)
        run_and_check(**schedule, drafts="mtp")


@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
@randomised(ring=25, nightly=60, soak=400, **ANY_SCHEDULE)
def test_whenever_eagle3_or_dflash_is_asked_too(kind: str, **schedule: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speculator, "_MIN_GAIN", 0.0)
        run_and_check(**schedule, drafts=kind)


def run_and_check(
    actions: list[Action], memory: tuple[bool, Sharing], n_ctx: int, sizes: dict[str, Any], drafts: str = ""
) -> None:
    unified, sharing = memory
    drafts = drafts or sizes["drafts"]
    del sizes["drafts"]
    proposer = FakeProposer() if drafts in ("lookup", "both") else None
    kind = "mtp" if drafts == "both" else drafts
    more = 2 if sizes.get("may_pad") else 1  # rows are padded from 3 to 4 and from 5 to 8, which needs spare seq_ids
    engine = fake_engine(
        n_ctx=n_ctx if unified or sizes.get("switches") else N_CTX * more,
        n_batch=N_BATCH * more,
        n_parallel=N_PARALLEL * more,
        unified=unified,
        sharing=sharing,
        reuse_costs=COSTS,
        adapters=ADAPTERS,
        proposers=[proposer] if proposer else [],
        head=(lambda context: fake_head(context, CLOCK, kind=kind)) if kind in CONTEXTS else None,
        **sizes,
    )
    run = Run(engine)
    for action in actions:
        run.do(action)
    run.drain()
    run.check_every_answer()
    run.check_all_is_free()
    assert not (proposer and proposer.known)
    if head := engine.core.runtime.head:
        assert not head._rows
        assert not head._followed


SWITCHING = st.lists(
    st.one_of(arrivals(), arrivals(N_CTX), st.just(Step()), st.just(Step()), st.just(SwitchLayout()), OTHERS),
    min_size=4,
    max_size=20,
)


@randomised(
    ring=50,
    nightly=150,
    soak=1000,
    actions=SWITCHING,
    memory=st.tuples(st.booleans(), st.sampled_from(("copy", "copy", "checkpoints", "whole", "none"))),
    sizes=SIZES,
)
def test_whenever_the_layout_is_switched_every_request_gets_the_text_it_gets_alone(
    actions: list[Action], memory: tuple[bool, Sharing], sizes: dict[str, Any]
) -> None:
    """Requests are as long as the unified layout takes them; streams hold a third of that."""
    run_and_check(actions, memory, N_CTX, {**sizes, "switches": True})


@randomised(
    ring=50,
    nightly=150,
    soak=1000,
    actions=ACTIONS,
    sharing=st.sampled_from(("copy", "copy", "checkpoints", "whole", "none")),
    n_parallel=st.sampled_from((1, 3, 6)),
    ubatch=st.sampled_from(((2, 4), (2, 7), (2, 64), (8, 16), (8, 19))),
    sizes=st.fixed_dictionaries(
        {"drafts": st.booleans(), "swap_space": HOST_MEMORY, "prefix_cache_ram": HOST_MEMORY, "may_pad": st.booleans()}
    ),
)
def test_in_any_schedule_no_ubatch_has_too_few_rows_where_that_changes_the_bits(
    actions: list[Action], sharing: Sharing, n_parallel: int, ubatch: tuple[int, int], sizes: dict[str, Any]
) -> None:
    """The fake context checks each ubatch. `ubatch`: its smallest and its largest size."""
    proposers = [FakeProposer()] if sizes.pop("drafts") else []
    min_rows, n_ubatch = ubatch
    n_ctx, n_batch = (LONGEST + min_rows) * n_parallel, max(n_ubatch, min_rows * n_parallel)
    engine = fake_engine(
        n_ctx=n_ctx, n_batch=n_batch, n_parallel=n_parallel, unified=False, sharing=sharing, adapters=ADAPTERS,
        min_rows=min_rows, n_ubatch=max(n_ubatch, n_parallel), proposers=proposers, reuse_costs=COSTS,
        **sizes,
    )  # fmt: skip
    run = Run(engine)
    for action in actions:
        run.do(action)
    run.drain()
    run.check_every_answer()
    run.check_all_is_free()


@randomised(ring=35, nightly=100, soak=500, actions=ACTIONS, memory=MEMORIES, failing_step=st.integers(1, 12))
def test_a_failed_step_ends_those_in_its_batch_and_changes_no_other_text(
    actions: list[Action], memory: tuple[bool, Sharing], failing_step: int
) -> None:
    unified, sharing = memory
    sizes: dict[str, Any] = {"n_ctx": N_CTX, "n_batch": N_BATCH, "n_parallel": N_PARALLEL, "reuse_costs": COSTS}
    run = Run(fake_engine(unified=unified, sharing=sharing, adapters=ADAPTERS, **sizes))
    context = context_of(run.engine)
    context.fail_at[failing_step] = DecodeFailed(-3, "made to fail")
    for action in actions:
        run.do(action)
    run.drain()
    run.check_every_answer()
    run.check_all_is_free()
    in_failed_batch = len(context.steps[failing_step - 1]) if len(context.steps) >= failing_step else 0
    assert run.engine.stats().finished.get("error", 0) == in_failed_batch
