"""`cppbatch bench throughput --spec`: the speedup from speculative decoding, by workload and batch size.

One engine runs the same requests with and without drafts (`SamplingParams.speculate`), alternately.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from cppbatch.bench.prompts import check_can_run, check_least
from cppbatch.bench.report import Column, Report, Spread, by_name, from_zero, new_figure, order_of_turn, plot_line
from cppbatch.bench.text_workloads import TEXT_WORKLOADS, TextWorkload
from cppbatch.chat.template import ChatTemplate
from cppbatch.config import EngineConfig
from cppbatch.engine.engine import BatchInferenceEngine
from cppbatch.engine.model_info import ModelInfo
from cppbatch.engine.params import SamplingParams
from cppbatch.engine.request import FinishReason, RequestUsage
from cppbatch.engine.runtime import load_model, open_runtime
from cppbatch.errors import GenerationFailed
from cppbatch.sizing.machine import this_machine

if TYPE_CHECKING:
    from matplotlib.figure import Figure


LEAST_AT_ONCE = 4  # a run has at least the number of requests for this concurrency
_ROOM = 1024  # tokens of a prompt at most, to size the context

_COLUMNS = [
    Column("workload", "workload"), Column("batch_size", "B"), Column("plain", "tok/s without"),
    Column("drafted", "tok/s with drafts"), Column("speedup", "speedup", 2), Column("decode_speedup", "of decode", 2),
    Column("draft_tokens_percent", "drafted %"), Column("acceptance_percent", "accepted %"),
    Column("same_texts", "same texts"),
]  # fmt: skip


class SpeedupSizes(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes to measure. Raises `ConfigError` for sizes out of range."""

    batch_sizes: tuple[int, ...] = (1, 2, 4, 8, 16)
    workloads: tuple[str, ...] = tuple(TEXT_WORKLOADS)
    """Keys of `TEXT_WORKLOADS`."""
    new_tokens: int | None = None
    """Maximum tokens of an answer; None: as in the workload."""
    repeats: int = 3

    def __post_init__(self) -> None:
        check_least({"--repeats": self.repeats})
        check_least({"--new-tokens": self.new_tokens}, 2)

    def max_tokens(self, workload: TextWorkload) -> int:
        """Returns the maximum tokens of an answer in this workload."""
        return workload.max_tokens if self.new_tokens is None else self.new_tokens


class Answer(NamedTuple):
    """The tokens of a request, with counts and times."""

    tokens: list[int]
    usage: RequestUsage


class WorkloadRun(msgspec.Struct, frozen=True):
    """One run of a workload. The answers are in the order of the requests."""

    seconds: float
    answers: list[Answer]

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens divided by the time of the whole run, including prompts."""
        return sum(each.usage.completion_tokens for each in self.answers) / self.seconds

    @property
    def decode_speed(self) -> float:
        """Tokens/s of one sequence after its first token, the mean over all tokens; 0 without such tokens."""
        usages = [each.usage for each in self.answers if each.usage.completion_tokens > 1]
        seconds = sum(usage.total_seconds - usage.first_token_seconds for usage in usages)
        return sum(usage.completion_tokens - 1 for usage in usages) / seconds if seconds > 0 else 0.0


class Turn(msgspec.Struct, frozen=True):
    """The same requests without and with drafts, run in direct succession."""

    plain: WorkloadRun
    drafted: WorkloadRun


def measure_speedup(
    config: EngineConfig, sizes: SpeedupSizes, progress: Callable[[str], object] = lambda line: None
) -> Report:
    """Measures all workloads at all batch sizes. `config.spec`: the source of the drafts.

    `progress` gets a line for each row. Raises `ConfigError`, `GenerationFailed` and the engine's exceptions.
    """
    n_new = max(sizes.max_tokens(TEXT_WORKLOADS[name]) for name in sizes.workloads)
    n_parallel = max(sizes.batch_sizes)
    rows = []
    with load_model(config) as model:
        longest = min(_ROOM + n_new, model.n_ctx_train)
        config = msgspec.structs.replace(config, n_ctx=n_parallel * longest, n_parallel=n_parallel)
        with BatchInferenceEngine(config, runtime=open_runtime(config, model)) as engine:
            check_can_run(engine.info, 1, n_new)
            for name in sizes.workloads:
                for batch_size in sizes.batch_sizes:
                    rows.append(_row(engine, name, batch_size, sizes))
                    n_cases = len(sizes.workloads) * len(sizes.batch_sizes)
                    progress(f"{len(rows)} of {n_cases}: {_line(rows[-1])}")
            return _report(config, sizes, engine.info, rows)


def _row(engine: BatchInferenceEngine, name: str, batch_size: int, sizes: SpeedupSizes) -> dict[str, Any]:
    workload = TEXT_WORKLOADS[name]
    params = SamplingParams(
        max_tokens=sizes.max_tokens(workload), temperature=workload.temperature, json_schema=workload.schema
    )
    n = workload.rounds * max(LEAST_AT_ONCE, batch_size)

    def run(repeat: int, *, speculate: bool) -> WorkloadRun:
        seed = f"{name}/{batch_size}/{repeat}"
        prompts = [chat_prompt(engine.info, message) for message in workload.prompts(n, seed)]
        own = msgspec.structs.replace(params, speculate=speculate)
        return run_prompts(engine, prompts, own, batch_size, salt=f"{seed}/{speculate}")

    run(-1, speculate=True)  # the engine learns the cost of steps and the acceptance rate
    turns = []
    for repeat in range(sizes.repeats):
        results = {speculate: run(repeat, speculate=speculate) for speculate in order_of_turn((False, True), repeat)}
        turns.append(Turn(plain=results[False], drafted=results[True]))
    return {"workload": name, "batch_size": batch_size, "requests": n, **speedup_figures(turns)}


def chat_prompt(info: ModelInfo, message: str) -> str:
    """Returns the prompt for this user message; the message itself if the model has no chat template."""
    if info.chat_template is None:
        return message
    template = ChatTemplate(info.chat_template, bos=info.bos, eos=info.eos)
    return template.render([{"role": "user", "content": message}])


def run_prompts(
    engine: BatchInferenceEngine, prompts: Sequence[str], params: SamplingParams, at_once: int, *, salt: str
) -> WorkloadRun:
    """Runs all prompts, `at_once` of them at a time, each with its own seed.

    `salt`: prefixes and drafts are only reused in runs with the same salt. Raises `GenerationFailed`.
    """
    engine.clear_prefix_cache()
    waiting = deque(enumerate(prompts))
    tokens: dict[str, list[int]] = {}
    usages: dict[str, RequestUsage] = {}
    began = perf_counter()
    while waiting or len(usages) < len(tokens):
        while waiting and len(tokens) - len(usages) < at_once:
            i, prompt = waiting.popleft()
            own = msgspec.structs.replace(params, seed=i)
            tokens[engine.add_request(prompt, own, cache_salt=salt, clamp_max_tokens=True)] = []
        for event in engine.step():
            tokens[event.request_id] += event.tokens
            if event.finish_reason is FinishReason.ERROR:
                raise GenerationFailed(event.error or "a request of the benchmark failed")
            if event.usage:
                usages[event.request_id] = event.usage
    return WorkloadRun(perf_counter() - began, [Answer(own, usages[name]) for name, own in tokens.items()])


def speedup_figures(turns: Sequence[Turn]) -> dict[str, Any]:
    """Returns the figures of a row. Ratios compare the two runs of a turn, so disturbances cancel out."""
    usages = [each.usage for turn in turns for each in turn.drafted.answers]
    generated, drafted, accepted = (
        sum(getattr(usage, name) for usage in usages)
        for name in ("completion_tokens", "drafted_tokens", "accepted_tokens")
    )
    pairs = [
        (one.tokens, other.tokens)
        for turn in turns
        for one, other in zip(turn.plain.answers, turn.drafted.answers, strict=True)
    ]
    return {
        "plain": Spread.of(turn.plain.tokens_per_second for turn in turns),
        "drafted": Spread.of(turn.drafted.tokens_per_second for turn in turns),
        "speedup": Spread.of(turn.drafted.tokens_per_second / turn.plain.tokens_per_second for turn in turns),
        "decode_speedup": Spread.of(
            turn.drafted.decode_speed / turn.plain.decode_speed if turn.plain.decode_speed else 1.0 for turn in turns
        ),
        "draft_tokens_percent": 100 * drafted / generated if generated else None,
        "acceptance_percent": 100 * accepted / drafted if drafted else None,
        "generated_tokens": generated,
        "drafted_tokens": drafted,
        "accepted_tokens": accepted,
        "same_texts": f"{sum(one == other for one, other in pairs)} of {len(pairs)}",
    }


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['workload']}, B = {row['batch_size']}: {row['speedup'].text(2)}x, "
        f"{row['plain'].text(1)} and {row['drafted'].text(1)} tok/s"
    )


def _report(config: EngineConfig, sizes: SpeedupSizes, info: ModelInfo, rows: list[dict[str, Any]]) -> Report:
    legend = "; ".join(f"{name}: {TEXT_WORKLOADS[name].about}" for name in sizes.workloads)
    return Report(
        kind="speculation",
        title=f"{info.name}: speculative decoding (--spec {config.spec} --draft-max {config.draft_max})",
        machine=this_machine(),
        model=info.name,
        settings={
            **msgspec.to_builtins(sizes),
            "spec": config.spec,
            "draft_max": config.draft_max,
            "kv_layout": config.kv_layout,
            "flash_attn": config.flash_attn,
            "n_threads": config.n_threads,
            "n_gpu_layers": config.n_gpu_layers,
        },
        columns=_COLUMNS,
        rows=rows,
        notes=[
            f"Workloads: {legend}.",
            "tok/s: generated tokens divided by the time of the whole run with its prompts; speedup: ratio per turn.",
            "of decode: the ratio of a sequence's tokens/s after its first token.",
            "drafted: draft tokens per 100 generated ones; accepted: the fraction of draft tokens.",
        ],
    )


def plot_speedup(report: Report) -> Figure:
    """Plots speedup and acceptance by batch size, with a line for each workload."""
    figure, axes = new_figure(report, 2)
    axes[0].axhline(1, color="grey", linewidth=0.8)
    titles = {"speedup": "tokens/s with drafts / without", "acceptance_percent": "accepted draft tokens, %"}
    for each, (key, title) in zip(axes, titles.items(), strict=True):
        for name, rows in by_name(report.rows, lambda row: row["workload"]).items():
            plot_line(each, (row["batch_size"] for row in rows), (row[key] or 0.0 for row in rows), label=name)
        each.set_title(title)
        each.set_xlabel("sequences at once")
        from_zero(each)
        each.legend(fontsize=7)
    return figure
