"""Runs the same requests under each strategy, alternately, on one context, and reports the comparison."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter, sleep
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from msgspec.structs import replace

from cppbatch.bench.bare_costs import measure_bare_costs
from cppbatch.bench.prompts import Lengths, check_can_run, check_least, random_prompt
from cppbatch.bench.report import Column, Report, Spread, by_name, doubling_axis, new_figure, plot_bars, plot_line
from cppbatch.bench.resource_usage import ResourceUsage
from cppbatch.bench.strategies import STRATEGIES
from cppbatch.bench.strategies.schedulers import ConcurrentScheduler, SequentialScheduler, StaticScheduler, round_up
from cppbatch.config import EngineConfig
from cppbatch.engine.engine import BatchInferenceEngine
from cppbatch.engine.ideal import RequestSize, ideal_seconds
from cppbatch.engine.model_info import ModelInfo
from cppbatch.engine.params import SamplingParams
from cppbatch.engine.runtime import Runtime, load_runtime
from cppbatch.engine.scheduler import Scheduler
from cppbatch.errors import ConfigError, GenerationFailed
from cppbatch.sizing.machine import this_machine

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_COLUMNS = [
    Column("batch_size", "B"), Column("strategy", "strategy"), Column("tokens_per_second", "tok/s"),
    Column("speedup", "x sequential", 2), Column("of_ideal", "of ideal", 2), Column("latency_p50", "latency p50 s", 2),
    Column("latency_p95", "p95", 2), Column("first_token_p50", "TTFT p50 s", 2), Column("first_token_p95", "p95", 2),
    Column("wait_p50", "wait p50 s", 2), Column("wait_p95", "p95", 2), Column("wait_p99", "p99", 2),
    Column("mean_rows", "rows/step"), Column("padding_percent", "padding %", 0), Column("cpu_percent", "CPU %", 0),
    Column("gpu_percent", "GPU %", 0),
]  # fmt: skip


class StrategyComparison(msgspec.Struct, frozen=True, kw_only=True):
    """The strategies and their settings. Raises `ConfigError` for settings out of range."""

    names: tuple[str, ...] = STRATEGIES
    batch_sizes: tuple[int, ...] = ()
    """Numbers of sequences at once, each with the same requests; empty: only the engine's."""
    requests_per_sequence: int = 0
    """Requests per sequence; 0: the number in the workload."""
    max_wait_ms: float = 50.0
    """The maximum time for collecting a static batch, or the first batch of continuous-window."""
    bucket: int = 64
    """Prompts of a padded batch are padded to a multiple of this."""
    repeats: int = 3

    def __post_init__(self) -> None:
        if not 0 <= self.max_wait_ms < float("inf"):
            raise ConfigError(f"--max-wait-ms is {self.max_wait_ms}; it must be 0 or more")
        check_least({"--bucket": self.bucket, "--repeats": self.repeats})


def make_schedulers(*, max_wait_s: float, bucket: int) -> dict[str, Callable[..., Scheduler]]:
    """Returns a factory for each of `STRATEGIES`, for `BatchInferenceEngine(policy=...)`."""
    return {
        "sequential": SequentialScheduler,
        "concurrent": ConcurrentScheduler,
        "static-padded": partial(StaticScheduler, max_wait_s=max_wait_s, bucket=bucket),
        "static-ragged": partial(StaticScheduler, max_wait_s=max_wait_s),
        "static-buckets": partial(StaticScheduler, max_wait_s=max_wait_s, bucket=bucket, is_by_length=True),
        "continuous": Scheduler,
        "continuous-window": Scheduler,
    }


def compare_strategies(
    config: EngineConfig,
    compared: StrategyComparison,
    work: OfflineWorkload,
    progress: Callable[[str], object] = lambda line: None,
) -> Report:
    """Measures; `progress` gets a line for each run. `config.n_ctx` is ignored: the requests determine it.

    With several batch sizes, the report has the rows of each, smallest first.

    Raises `ConfigError` and the engine's exceptions.
    """
    if config.kv_layout == "auto":  # all strategies share one context, so none may switch its layout
        config = replace(config, kv_layout="unified")
    sizes = sorted(compared.batch_sizes) or [config.n_parallel]
    rows: list[dict[str, Any]] = []
    for n in sizes:
        here = replace(work, n_requests=n * compared.requests_per_sequence or work.n_requests)
        info, runs_by_strategy, ideal_s = _measure(replace(config, n_parallel=n), compared, here, progress)
        sequential = runs_by_strategy.get("sequential")
        for name, runs in runs_by_strategy.items():
            of_ideal = Spread.of(ideal_s / run.seconds for run in runs)
            rows.append({"batch_size": n, **_row(name, runs, sequential), "of_ideal": of_ideal})
    each = f"{compared.requests_per_sequence} for each sequence" if compared.requests_per_sequence else work.n_requests
    return Report(
        kind="strategies",
        title=f"{info.name}: requests: {each}, {_arrival(work)}, prompts of {work.prompt_tokens} and "
        f"{work.new_tokens} new tokens, B = {', '.join(map(str, sizes))} sequences, {info.kv_layout}",
        machine=this_machine(),
        model=info.name,
        settings={
            **msgspec.to_builtins(work),
            **msgspec.to_builtins(compared),
            "n_parallel": sizes[-1],
            "kv_layout": info.kv_layout,
            "flash_attn": config.flash_attn,
            "sampling": info.sampling,
            "n_threads": config.n_threads,
        },
        columns=_COLUMNS,
        rows=rows,
        notes=[
            "wait: from a request's arrival to its admission. padding: computed tokens not needed by any request.",
            "of ideal: the minimum time for these requests, with up to B rows per step and costs measured before the "
            "first run, divided by the time they took.",
        ],
    )


def _measure(
    config: EngineConfig, compared: StrategyComparison, work: OfflineWorkload, progress: Callable[[str], object]
) -> tuple[ModelInfo, dict[str, list[WorkloadRun]], float]:
    """The runs of each strategy with `config.n_parallel` sequences, and the ideal seconds of the requests."""
    longest = round_up(work.prompt_tokens.high, compared.bucket) + work.new_tokens.high
    config = replace(
        config,
        n_ctx=config.n_parallel * longest,
        max_queue=max(config.max_queue, work.n_requests),
        prefix_cache=False,
        spec="off",  # the other strategies do not use drafts
    )
    runtime = load_runtime(config)
    try:
        check_can_run(runtime.info, work.prompt_tokens.high, work.new_tokens.high)
        requests = work.requests(runtime.info.n_vocab)
        sizes = [RequestSize(len(request.prompt), request.n_new, arrives=request.at) for request in requests]
        ideal_s = ideal_seconds(sizes, measure_bare_costs(runtime, config.n_parallel), config.n_parallel)
        return runtime.info, run_all(config, runtime, compared, requests, progress), ideal_s
    finally:
        runtime.close()


def run_all(
    config: EngineConfig,
    runtime: Runtime,
    compared: StrategyComparison,
    requests: list[TimedRequest],
    progress: Callable[[str], object],
) -> dict[str, list[WorkloadRun]]:
    """Returns the runs of each strategy. Strategies take turns, so that all run under the same conditions."""
    shared = replace(runtime, close=lambda: None)
    schedulers = make_schedulers(max_wait_s=compared.max_wait_ms / 1000, bucket=compared.bucket)
    with contextlib.ExitStack() as stack:
        engines = {}
        for name in compared.names:
            window = compared.max_wait_ms if name == "continuous-window" else 0
            engine = BatchInferenceEngine(
                config, max_wait_ms=window, runtime=shared, policy=schedulers[name], survives_failures=False
            )
            engines[name] = stack.enter_context(engine)
        warm_up = [replace(request, at=0.0, n_new=min(request.n_new, 4)) for request in requests[: config.n_parallel]]
        run_workload(engines[compared.names[-1]], warm_up)
        runs_by_strategy: dict[str, list[WorkloadRun]] = {name: [] for name in engines}
        for _ in range(compared.repeats):
            for name, engine in engines.items():
                runs_by_strategy[name].append(run_workload(engine, requests))
                at = f"B = {config.n_parallel}, " if compared.batch_sizes else ""
                n_done, n_runs = sum(map(len, runs_by_strategy.values())), compared.repeats * len(engines)
                progress(f"{at}{n_done} of {n_runs}: {name}: {runs_by_strategy[name][-1].tokens_per_second:.1f} tok/s")
    return runs_by_strategy


def _row(name: str, runs: Sequence[WorkloadRun], sequential: Sequence[WorkloadRun] | None) -> dict[str, Any]:
    def of(figure: Callable[[WorkloadRun], float]) -> Spread:
        return Spread.of(map(figure, runs))

    row: dict[str, Any] = {
        "strategy": name, "seconds": of(lambda run: run.seconds),
        "tokens_per_second": of(lambda run: run.tokens_per_second), "speedup": None,
        "mean_rows": of(lambda run: run.mean_rows), "cpu_percent": of(lambda run: run.cpu_percent),
    }  # fmt: skip
    row["padding_percent"] = of(lambda run: run.padding_percent)
    row |= {f"wait_p{q}": Spread.of(float(np.percentile(run.wait, q)) for run in runs) for q in (50, 95, 99)}
    for q in (50, 95):
        row[f"latency_p{q}"] = Spread.of(float(np.percentile(run.latency, q)) for run in runs)
        row[f"first_token_p{q}"] = Spread.of(float(np.percentile(run.first_token, q)) for run in runs)
    if sequential:
        pairs = zip(runs, sequential, strict=True)
        row["speedup"] = Spread.of(run.tokens_per_second / alone.tokens_per_second for run, alone in pairs)
    row["gpu_percent"] = Spread.of_known(run.gpu_percent for run in runs)
    return row


def _arrival(work: OfflineWorkload) -> str:
    return f"{work.rate:g} per second" if work.rate else "all at once"


# --- offline workload ------------------------------------------------------------------------------------------------
# The requests of a strategy comparison: the same lengths, tokens and arrival times for every strategy.


class TimedRequest(msgspec.Struct, frozen=True):
    """One request."""

    at: float
    """Arrival in seconds after the start."""
    prompt: list[int]
    n_new: int


class OfflineWorkload(msgspec.Struct, frozen=True, kw_only=True):
    """Number and sizes of requests. Raises `ConfigError` if they are out of range."""

    n_requests: int = 48
    prompt_tokens: Lengths = Lengths(16, 256)
    new_tokens: Lengths = Lengths(16, 256)
    rate: float = 0.0
    """Requests/s with exponential gaps (a Poisson process); 0: all at once."""
    seed: int = 0

    def __post_init__(self) -> None:
        check_least({"--requests": self.n_requests})
        self.prompt_tokens.check("--prompt-tokens")
        self.new_tokens.check("--new-tokens")
        if not 0 <= self.rate < float("inf"):
            raise ConfigError(f"--rate is {self.rate}; it must be 0 (all at once) or a number of requests per second")
        if self.seed < 0:
            raise ConfigError(f"--seed is {self.seed}; it must be 0 or more")

    def requests(self, n_vocab: int) -> list[TimedRequest]:
        """Returns the requests in order of arrival, always the same for a given workload and vocabulary.

        Lengths are log-uniform: half of them are below the geometric mean of the range, and a few are long.
        """
        draw, n = np.random.default_rng(self.seed), self.n_requests
        prompts, news = (_random_lengths(draw, lengths, n) for lengths in (self.prompt_tokens, self.new_tokens))
        gaps = draw.exponential(1 / self.rate, n) if self.rate else np.zeros(n)
        at = np.cumsum(gaps) - gaps[0]
        return [
            TimedRequest(float(at[i]), random_prompt(draw, prompts[i], n_vocab).tolist(), news[i]) for i in range(n)
        ]


def _random_lengths(draw: np.random.Generator, lengths: Lengths, n: int) -> list[int]:
    low, high = lengths
    values: list[int] = np.exp(draw.uniform(np.log(low), np.log(high + 1), n)).astype(int).clip(low, high).tolist()
    return values


# --- strategy runner -------------------------------------------------------------------------------------------------


class WorkloadRun(msgspec.Struct, frozen=True):
    """The result of a workload. Lists are in the order of the requests; times are in seconds from arrival."""

    seconds: float
    tokens: list[list[int]]
    first_token: list[float]
    latency: list[float]
    wait: list[float]
    """Until a request is admitted."""
    padding_percent: float
    """Fraction of computed tokens not needed by any request."""
    mean_rows: float
    """Mean number of sequences in a decode step."""
    cpu_percent: float
    gpu_percent: float | None

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second of the whole run."""
        return sum(map(len, self.tokens)) / self.seconds


def run_workload(engine: BatchInferenceEngine, requests: list[TimedRequest]) -> WorkloadRun:
    """Runs the requests with greedy sampling, to their full length, each from its arrival time.

    A request that arrives during a step is added after the step; this wait counts. Raises `GenerationFailed` if a
    request ends early.
    """
    n = len(requests)
    tokens: list[list[int]] = [[] for _ in requests]
    late, first_token, latency, wait = [0.0] * n, [0.0] * n, [0.0] * n, [0.0] * n
    pending = deque(enumerate(requests))
    before = engine.stats()
    with ResourceUsage() as usage:
        began = perf_counter()
        while pending or engine.has_work:
            while pending and pending[0][1].at <= (now := perf_counter() - began):
                i, request = pending.popleft()
                late[i] = now - request.at
                params = SamplingParams(temperature=0, max_tokens=request.n_new, ignore_eos=True)
                engine.add_request(request.prompt, params, request_id=str(i))
            events = engine.step() if engine.has_work and not engine.core.collecting_s() else []
            for event in events:
                i = int(event.request_id)
                tokens[i] += event.tokens
                if event.usage:
                    if len(tokens[i]) != requests[i].n_new:
                        raise GenerationFailed(f"request {i} ended after {len(tokens[i])} tokens: {event.error}")
                    wait[i] = late[i] + event.usage.queue_seconds
                    first_token[i] = late[i] + event.usage.first_token_seconds
                    latency[i] = late[i] + event.usage.total_seconds
            if not events and not engine.core.scheduler.running:
                sleep(0.001)
        seconds = perf_counter() - began
    after = engine.stats()
    rows, steps = after.decode_rows - before.decode_rows, after.decode_steps - before.decode_steps
    computed = rows + after.prompt_tokens - before.prompt_tokens
    needed = sum(len(request.prompt) + request.n_new - 1 for request in requests)  # the last token is not computed
    return WorkloadRun(
        seconds=seconds, tokens=tokens, first_token=first_token, latency=latency, wait=wait,
        padding_percent=max(0.0, 100 * (1 - needed / computed)), mean_rows=rows / steps if steps else 0.0,
        cpu_percent=usage.cpu_percent, gpu_percent=usage.gpu_percent,
    )  # fmt: skip


# --- strategies plot -------------------------------------------------------------------------------------------------

_TIMES = {
    "first_token_p50": "TTFT p50", "first_token_p95": "TTFT p95",
    "latency_p50": "latency p50", "latency_p95": "latency p95",
}  # fmt: skip


def plot_strategies(report: Report) -> Figure:
    """Plots bars for each strategy, with their range over the repeats; lines if there are several batch sizes."""
    figure, (speed, times) = new_figure(report, 2)
    speed.set_title("generated tokens/s")
    sizes = list(dict.fromkeys(row["batch_size"] for row in report.rows))
    if len(sizes) > 1:
        for axes, key in ((speed, "tokens_per_second"), (times, "latency_p95")):
            for name, rows in by_name(report.rows, lambda row: row["strategy"]).items():
                plot_line(axes, (row["batch_size"] for row in rows), (row[key] for row in rows), label=name)
            doubling_axis(axes, sizes, "sequences at once (B)")
        times.set_title("latency p95, seconds")
        speed.legend(fontsize=7)
        return figure
    names, places = [row["strategy"] for row in report.rows], range(len(report.rows))
    plot_bars(speed, places, (row["tokens_per_second"] for row in report.rows))
    width = 0.8 / len(_TIMES)
    for i, (key, label) in enumerate(_TIMES.items()):
        style = {"color": "tab:orange" if key.startswith("first") else "tab:blue", "alpha": 0.5 if "50" in key else 1.0}
        at = [place + (i - 1.5) * width for place in places]
        plot_bars(times, at, (row[key] for row in report.rows), width=width, label=label, **style)
    times.set_title("seconds from arrival")
    times.margins(y=0.3)  # room for the legend
    times.legend(loc="upper center", ncols=2)
    for axes in (speed, times):
        axes.set_xticks(places, names, rotation=20)
    return figure
