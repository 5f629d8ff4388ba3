"""A real engine for a simulation: measures its step times, and computes a load in real time to compare with."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from statistics import median
from time import perf_counter, sleep
from typing import Any, NamedTuple

import msgspec
import numpy as np

from cppbatch.engine.engine import BatchInferenceEngine
from cppbatch.engine.params import SamplingParams
from cppbatch.engine.scheduler import Scheduler
from cppbatch.engine.sequence import SeqStatus
from cppbatch.engine.step_plan import StepPlan
from fleet.conversations import Conversation, Load, conversations
from fleet.simulated_request import SimulatedRequest
from fleet.simulation import FleetRun
from fleet.step_times import Curve, StepTimes, at

_ROWS = (1, 2, 4, 8, 12, 16, 32, 64)
_PIECES = (4, 16, 64, 128, 256, 512)
_TURNS = 3
_NEW = 24
_LONGEST_SLEEP = 0.02


class Step(NamedTuple):
    """What a step computed, and its seconds."""

    rows: tuple[int, ...]
    """Decode rows, of each group that is computed together."""
    row_cells: int
    """Cells that they passed over."""
    n_prompt: int
    n_before: int
    """Tokens of the prompt that were computed before."""
    seconds: float

    def is_rows(self, n: int) -> bool:
        """Whether it computed nothing but `n` decode rows, together."""
        return self.rows == (n,) and not self.n_prompt


class RecordingScheduler(Scheduler):
    """Notes what each step took."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.steps: list[Step] = []

    def computed(self, plan: StepPlan, seconds: float, decode_s: float | None = None) -> None:
        """See `Scheduler.computed`."""
        row_cells = sum(s.n_computed for s, _ in plan.chunks if s.status is SeqStatus.DECODE)
        prompts = [(s, n) for s, n in plan.chunks if s.status is SeqStatus.PREFILL]
        first = prompts[0][0].n_computed if prompts else 0
        self.steps.append(Step(tuple(plan.row_groups), row_cells, sum(n for _, n in prompts), first, seconds))
        super().computed(plan, seconds, decode_s)


def open_engine(
    model: str, *, n_parallel: int, stream_cells: int, cache_mib: int, n_threads: int = 0
) -> BatchInferenceEngine:
    """An engine in the per-sequence layout, without drafts, like a simulated replica."""
    return BatchInferenceEngine(
        model, n_parallel=n_parallel, n_ctx=n_parallel * stream_cells, kv_layout="per-sequence", spec="off",
        prefix_cache_ram=cache_mib, swap_space=cache_mib, n_threads=n_threads, policy=RecordingScheduler,
    )  # fmt: skip


def measure_step_times(engine: BatchInferenceEngine, *, name: str, source: str, start_s: float) -> StepTimes:
    """Runs prompts and decode rows of several sizes, a minute on two CPU cores. The engine is idle."""
    generate(engine, 1, 64)  # warm-up
    counts = [n for n in _ROWS if n <= engine.config.n_parallel]
    most = counts[-1]
    rows, pieces, long = defaultdict[int, list[float]](list), defaultdict[int, list[float]](list), []
    for _ in range(_TURNS):  # alternately: another program that takes the cores for a while disturbs all sizes alike
        for n in counts:
            rows[n] += [step.seconds for step in generate(engine, n, 16) if step.is_rows(n)]
        for n in _PIECES:
            pieces[n] += [step.seconds for step in prefill(engine, n)]
        long += [step for step in generate(engine, most, 1024, shared=True) if step.is_rows(most)]
    rows_ms: Curve = [(n, 1e3 * median(rows[n])) for n in counts]
    more_cells = median(step.row_cells for step in long) - most * (16 + _NEW / 2)
    row_cell_us = 1e6 * (median(step.seconds for step in long) - median(rows[most])) / more_cells
    prompt_ms: Curve = [(n, 1e3 * median(pieces[n])) for n in _PIECES]
    after = [step for _ in range(_TURNS) for step in prefill(engine, 1536) if step.n_before == 1024]
    prompt_cell_us = 1e6 * (median(step.seconds / step.n_prompt for step in after) - median(pieces[512]) / 512) / 1024
    save_us, copy_us = measure_moves(engine)
    config = engine.config
    return StepTimes(
        name=name, source=source, rows_ms=_rising(rows_ms), prompt_ms=_rising(prompt_ms),
        row_cell_us=max(0.0, row_cell_us), prompt_cell_us=max(0.0, float(prompt_cell_us)),
        step_ms=measure_overhead(engine), save_us=save_us, copy_us=copy_us, cell_bytes=cell_bytes(engine),
        start_s=start_s, on_gpu=False, n_parallel=config.n_parallel, stream_cells=engine.core.kv.n_ctx_seq,
        n_batch=config.n_batch, n_ubatch=config.n_ubatch,
    )  # fmt: skip


def generate(engine: BatchInferenceEngine, n: int, n_prompt: int, *, shared: bool = False) -> list[Step]:
    """Steps of `n` sequences with prompts of this length, which generate 24 tokens each. `shared`: all have the same
    prompt, which is computed once and copied, so that they decode at the same time."""
    scheduler = _recording(engine)
    scheduler.steps.clear()
    rng = np.random.default_rng()
    prompts = [rng.integers(100, 30000, n_prompt).tolist() for _ in range(n)]
    engine.generate([prompts[0]] * n if shared else prompts, _params(_NEW), cache_prompt=shared)
    engine.clear_prefix_cache()
    return scheduler.steps[2:]


def prefill(engine: BatchInferenceEngine, n: int) -> list[Step]:
    """The steps of one prompt of `n` tokens."""
    scheduler = _recording(engine)
    scheduler.steps.clear()
    engine.generate([np.random.default_rng().integers(100, 30000, n).tolist()], _params(1), cache_prompt=False)
    return [step for step in scheduler.steps if step.n_prompt]


def measure_moves(engine: BatchInferenceEngine) -> tuple[float, float]:
    """Microseconds a token to save a state to host memory, and to restore it in another stream."""
    n, context = 512, engine.core.runtime.context
    engine.generate([np.random.default_rng().integers(100, 30000, n).tolist()], _params(1))
    (cached, *_) = engine.core.kv.cache.in_cells
    times: dict[str, list[float]] = defaultdict(list)
    for _ in range(5):
        began = perf_counter()
        state: Any = context.save_sequence(cached.seq_id)
        times["save"].append(perf_counter() - began)
        free = engine.core.kv.spare_ids()[0]
        began = perf_counter()
        context.restore_sequence(free, state)
        times["restore"].append(perf_counter() - began)
        context.remove(free)
    engine.clear_prefix_cache()
    save, restore = median(times["save"]), median(times["restore"])
    return 1e6 * save / n, 1e6 * (save + restore) / n


def measure_overhead(engine: BatchInferenceEngine) -> float:
    """Milliseconds of a step in which neither llama.cpp computes nor tokens are sampled."""
    scheduler, rng = _recording(engine), np.random.default_rng()
    n = engine.config.n_parallel
    for i in range(n):
        engine.add_request(rng.integers(100, 30000, 16).tolist(), _params(_NEW), request_id=f"m{i}", cache_prompt=False)
    overheads = []
    while engine.has_work:
        scheduler.steps.clear()
        began = perf_counter()
        engine.step()
        if scheduler.steps:
            overheads.append(perf_counter() - began - scheduler.steps[-1].seconds)
    return 1e3 * median(overheads)


def cell_bytes(engine: BatchInferenceEngine) -> int:
    """Bytes of the keys and values of one token, from the size of a saved state."""
    engine.generate([list(range(100, 356))], _params(1))
    (cached, *_) = engine.core.kv.cache.in_cells
    state: Any = engine.core.runtime.context.save_sequence(cached.seq_id)
    engine.clear_prefix_cache()
    return int(state.n_bytes) // cached.n_computed


def mean_times(one: StepTimes, other: StepTimes) -> StepTimes:
    """The mean of two measurements of the same engine."""

    def mean(a: Curve, b: Curve) -> Curve:
        return [(n, (x + y) / 2) for (n, x), (_, y) in zip(a, b, strict=True)]

    return msgspec.structs.replace(
        one,
        rows_ms=mean(one.rows_ms, other.rows_ms),
        prompt_ms=mean(one.prompt_ms, other.prompt_ms),
        row_cell_us=(one.row_cell_us + other.row_cell_us) / 2,
        prompt_cell_us=(one.prompt_cell_us + other.prompt_cell_us) / 2,
    )


def take_steps(engine: BatchInferenceEngine) -> list[Step]:
    """The steps since the last load began."""
    return list(_recording(engine).steps)


def step_ratios(steps: Sequence[Step], times: StepTimes) -> dict[str, tuple[int, float]]:
    """By what steps computed: their number, and their simulated time by the measured one."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    for step in steps:
        kind = ("rows and prompts" if step.n_prompt else "rows") if step.rows else "prompts"
        milliseconds = sum(at(times.rows_ms, n) for n in step.rows) + step.row_cells * times.row_cell_us / 1e3
        if step.n_prompt:
            milliseconds += (
                times.prompts_ms([step.n_prompt]) + step.n_prompt * step.n_before * times.prompt_cell_us / 1e3
            )
        for i, value in enumerate((1, milliseconds / 1e3, step.seconds)):
            sums[kind][i] += value
    return {kind: (int(n), simulated / measured) for kind, (n, simulated, measured) in sums.items()}


def run_load(
    engine: BatchInferenceEngine, load: Load, *, progress: Callable[[float], object] = lambda now: None
) -> FleetRun:
    """Computes a load in real time, as `FleetSimulation` does in virtual time. Each answer has the length that the load
    says, and the next turn has the tokens of the answer that the model gave."""
    run, waiting = FleetRun(), _Queue(load)
    requests: dict[str, SimulatedRequest] = {}
    speakers: dict[str, Conversation] = {}
    _recording(engine).steps.clear()
    began, next_progress = perf_counter(), 0.0
    while requests or waiting.next_at < load.seconds:
        now = perf_counter() - began
        while waiting.next_at <= now:
            at, conversation = waiting.pop()
            if (request := conversation.next_request()) is not None:
                request.arrived_at = at
                requests[request.request.id], speakers[request.request.id] = request, conversation
                engine.add_request(request.request.prompt, _params(len(request.output)), request_id=request.request.id)
        if not engine.has_work:
            sleep(max(0.0, min(_LONGEST_SLEEP, waiting.next_at - now)))
            continue
        for event in engine.step():
            now, request = perf_counter() - began, requests[event.request_id]
            if event.tokens and not request.n_generated:
                request.first_token_at = now
            request.output[request.n_generated : request.n_generated + len(event.tokens)] = event.tokens
            request.n_generated += len(event.tokens)
            if event.finish_reason:
                assert event.usage
                request.finished_at, request.n_cached, request.replica = now, event.usage.cached_tokens, 0
                run.finished.append(requests.pop(event.request_id))
                conversation = speakers.pop(event.request_id)
                conversation.answered(request.output)
                request.forget_tokens()
                waiting.push(now + conversation.think_s(), conversation)
        if now >= next_progress:
            progress(now)
            next_progress = now + 1
    run.end_s = run.replica_s = perf_counter() - began
    run.busy_s = sum(step.seconds for step in _recording(engine).steps)
    return run


class _Queue:
    """Conversations with the times of their next requests."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._new = conversations(load)
        self._heap: list[tuple[float, int, Conversation]] = []
        self._n = 0
        self._push_new()

    def _push_new(self) -> None:
        if beginning := next(self._new, None):
            self.push(*beginning)
            self._newest = beginning[1]

    @property
    def next_at(self) -> float:
        return self._heap[0][0] if self._heap else float("inf")

    def push(self, at: float, conversation: Conversation) -> None:
        if at < self._load.seconds:
            self._n += 1
            heappush(self._heap, (at, self._n, conversation))

    def pop(self) -> tuple[float, Conversation]:
        at, _, conversation = heappop(self._heap)
        if conversation is self._newest:
            self._push_new()
        return at, conversation


def _recording(engine: BatchInferenceEngine) -> RecordingScheduler:
    scheduler = engine.core.scheduler
    assert isinstance(scheduler, RecordingScheduler)
    return scheduler


def _params(n: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=n, ignore_eos=True)


def _rising(curve: Sequence[tuple[int, float]]) -> Curve:
    """The curve with what noise made fall made level, to a hundredth of a millisecond."""
    highest, rising = 0.0, []
    for n, milliseconds in curve:
        highest = max(highest, round(milliseconds, 2))
        rising.append((n, highest))
    return rising
