"""A real engine beside the simulation: measures its step times, and computes a load in real time."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
from msgspec.structs import replace

from cppbatch import BatchInferenceEngine, GenerationRequest, SamplingParams
from cppbatch.bench.bare_costs import measure_bare_costs
from cppbatch.bench.prompts import random_prompt
from cppbatch.cluster.engines.client import EngineClient
from cppbatch.cluster.engines.local import LocalEngine
from cppbatch.config import EngineConfig
from cppbatch.engine.runtime import Runtime
from cppbatch.engine.scheduler import Scheduler
from cppbatch.engine.sequence import SeqStatus
from cppbatch.engine.step_plan import StepPlan
from cppbatch.llama import Batch
from fleet.conversations import Conversation, Load, conversations
from fleet.result import FleetRun
from fleet.step_times import StepTimes, at

_MOVED, _NEW = 512, 24  # tokens
_MOVES = 5


def engine_config(model: str, *, n_parallel: int, stream_cells: int, cache_mib: int, n_threads: int) -> EngineConfig:
    """Returns the settings of a replica: the per-sequence layout, without drafts."""
    return EngineConfig(
        model, n_parallel=n_parallel, n_ctx=n_parallel * stream_cells, kv_layout="per-sequence", spec="off",
        prefix_cache_ram=cache_mib, swap_space=cache_mib, n_threads=n_threads,
    )  # fmt: skip


def measure_step_times(config: EngineConfig, runtime: Runtime, *, name: str, start_s: float) -> StepTimes:
    """Measures an empty context, in a minute on two CPU cores; it is empty again afterwards."""
    costs = measure_bare_costs(runtime, config.n_parallel)
    save_us, copy_us, cell_bytes = _measure_moves(runtime)
    return StepTimes(
        name=name, source="scripts/simulate_fleet.py measure",
        rows_ms=[(n, 1e3 * seconds) for n, seconds in costs.rows],
        prompt_ms=[(n, 1e3 * n * seconds) for n, seconds in costs.tokens],
        row_cell_us=1e6 * costs.row_cell_s, prompt_cell_us=1e6 * costs.token_cell_s,
        step_ms=_measure_overhead(config, runtime), save_us=save_us, copy_us=copy_us, cell_bytes=cell_bytes,
        start_s=start_s, on_gpu=runtime.info.on_gpu, n_parallel=config.n_parallel,
        stream_cells=config.n_ctx // config.n_parallel, n_batch=config.n_batch, n_ubatch=config.n_ubatch,
    )  # fmt: skip


def _measure_moves(runtime: Runtime) -> tuple[float, float, int]:
    """Returns microseconds a token to save a state, and to save and restore it elsewhere; bytes of a cell."""
    context: Any = runtime.context
    batch, seconds = Batch(context.n_batch), defaultdict[str, list[float]](list)
    batch.add_run(random_prompt(np.random.default_rng(0), _MOVED, runtime.info.n_vocab), 0, 0, n_logits=1)
    context.decode(batch)
    for _ in range(_MOVES):
        began = perf_counter()
        state = context.save_sequence(0)
        saved = perf_counter()
        context.restore_sequence(1, state)
        seconds["save"].append(saved - began)
        seconds["both"].append(perf_counter() - began)
        context.remove(1)
    context.remove(0)
    save_us, both_us = (1e6 * median(seconds[name]) / _MOVED for name in ("save", "both"))
    return save_us, both_us, state.n_bytes // _MOVED


def _measure_overhead(config: EngineConfig, runtime: Runtime) -> float:
    """Returns milliseconds of a step outside llama.cpp and sampling."""
    prompts = [[100 + i, *range(200, 215)] for i in range(config.n_parallel)]
    with BatchInferenceEngine(config, runtime=replace(runtime, close=lambda: None)) as engine:
        engine.generate(prompts, SamplingParams(temperature=0, max_tokens=_NEW, ignore_eos=True), progress=False)
        stats = engine.stats()
    runtime.context.clear()
    return 1e3 * sum(stats.step_seconds[phase] for phase in ("schedule", "fill", "advance")) / stats.steps


def mean_times(one: StepTimes, other: StepTimes) -> StepTimes:
    """Returns the mean of two measurements of the same engine."""
    means: dict[str, Any] = {name: (getattr(one, name) + getattr(other, name)) / 2 for name in StepTimes.CELL_TIMES}
    for name in ("rows_ms", "prompt_ms"):
        pairs = zip(getattr(one, name), getattr(other, name), strict=True)
        means[name] = [(n, (x + y) / 2) for (n, x), (_, y) in pairs]
    return replace(one, **means)


async def converse(engine: EngineClient, conversation: Conversation, run: FleetRun, until: float | None) -> None:
    """Holds a conversation: each answer has its planned length, and the next prompt has the tokens that the model gave.

    `until`: no request is sent after this time on the run's clock; None: all are, without pauses.
    """
    while (request := conversation.next_request()) is not None:
        request.arrived_at, request.replica = run.clock(), 0
        params = SamplingParams(temperature=0, max_tokens=request.n_output, ignore_eos=True)
        output = list[int]()
        async for event in engine.submit(
            GenerationRequest(id=request.id, prompt=request.request.prompt, params=params)
        ):
            if event.tokens and not output:
                request.first_token_at = run.clock()
            output += event.tokens
            if event.usage:
                request.n_cached = event.usage.cached_tokens
        request.finished_at = run.clock()
        assert len(output) == request.n_output
        conversation.answered(output)
        request.forget_tokens()
        run.finished.append(request)
        if until is not None:
            pause = conversation.think_s()
            if run.clock() + pause >= until:
                return
            await asyncio.sleep(pause)


class Step(NamedTuple):
    """What a step computed, and its seconds."""

    rows: tuple[int, ...]
    """Decode rows of each group."""
    row_cells: int
    n_prompt: int
    n_before: int
    """Tokens of the prompt that were computed before."""
    seconds: float


@asynccontextmanager
async def recorded_engine(config: EngineConfig, runtime: Runtime) -> AsyncIterator[tuple[LocalEngine, list[Step]]]:
    """Runs an engine, and notes what each step took."""
    steps: list[Step] = []
    computed = Scheduler.computed

    def record(self: Scheduler, plan: StepPlan, seconds: float, decode_s: float | None = None) -> None:
        cells = sum(s.n_computed for s, _ in plan.chunks if s.status is SeqStatus.DECODE)
        prompts = [(s.n_computed, n) for s, n in plan.chunks if s.status is SeqStatus.PREFILL]
        n_before = prompts[0][0] if prompts else 0
        steps.append(Step(tuple(plan.row_groups), cells, sum(n for _, n in prompts), n_before, seconds))
        computed(self, plan, seconds, decode_s)

    with patch.object(Scheduler, "computed", record):
        async with LocalEngine(config, runtime=replace(runtime, close=lambda: None)) as engine:
            yield engine, steps


async def run_load(config: EngineConfig, runtime: Runtime, load: Load) -> tuple[FleetRun, list[Step]]:
    """Computes a load in real time, as `FleetSimulation` does in virtual time."""
    async with recorded_engine(config, runtime) as (engine, steps):
        run = FleetRun()

        async def begin(seconds: float, conversation: Conversation) -> None:
            await asyncio.sleep(seconds - run.clock())
            await converse(engine, conversation, run, load.seconds)

        await asyncio.gather(*(begin(*beginning) for beginning in conversations(load)))
        run.end_s = run.replica_s = run.clock()
        run.busy_s = sum(step.seconds for step in steps)
    runtime.context.clear()
    return run, steps


def step_ratios(steps: Iterable[Step], times: StepTimes) -> dict[str, tuple[int, float]]:
    """Returns by what steps computed: their number, and their simulated time by the measured one."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    for step in steps:
        kind = ("rows and prompts" if step.n_prompt else "rows") if step.rows else "prompts"
        for i, value in enumerate((1, simulated_s(step, times), step.seconds)):
            sums[kind][i] += value
    return {kind: (int(n), simulated / measured) for kind, (n, simulated, measured) in sums.items()}


def simulated_s(step: Step, times: StepTimes) -> float:
    milliseconds = sum(at(times.rows_ms, n) for n in step.rows) + step.row_cells * times.row_cell_us / 1e3
    pieces: Sequence[int] = [step.n_prompt] if step.n_prompt else []
    return (milliseconds + times.prompts_ms(pieces) + step.n_prompt * step.n_before * times.prompt_cell_us / 1e3) / 1e3
