"""`cppbatch bench throughput`: prefill and decode speed by batch size, KV layout and flash attention.

Compares the engine with a bare loop over `llama_decode`, which is the upper bound for any engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from cppbatch.bench.energy import EnergyMeter, EnergySettings, energy_meter, tokens_per_kwh
from cppbatch.bench.prompts import check_can_run, check_least, random_prompt
from cppbatch.bench.report import Column, Report, Spread, by_name, from_zero, new_figure, plot_line
from cppbatch.bench.resource_usage import ResourceUsage
from cppbatch.config import FLOAT_CACHES, EngineConfig
from cppbatch.engine.engine import BatchInferenceEngine
from cppbatch.engine.ideal import BareCosts, RequestSize, ideal_seconds
from cppbatch.engine.model_info import ModelInfo
from cppbatch.engine.observe.metrics import PHASES
from cppbatch.engine.params import SamplingParams
from cppbatch.engine.runtime import Computation, Runtime, load_model, open_runtime
from cppbatch.errors import ConfigError, EstimateFailed
from cppbatch.llama import Backend, Batch
from cppbatch.models.batch_gain import gain_notes
from cppbatch.sizing.estimate import estimate_memory
from cppbatch.sizing.machine import this_machine

if TYPE_CHECKING:
    from matplotlib.figure import Figure


Prompts = list[npt.NDArray[np.int32]]


class Speeds(NamedTuple):
    """Tokens/s of all sequences together."""

    prefill: float
    decode: float


def bare_loop(context: Computation, batch: Batch, prompts: Prompts, n_new: int) -> Speeds:
    """Computes the prompts in full batches, then decodes a fixed token n_new - 1 times per sequence. Does not sample.

    The context must be empty and is empty again afterwards. All prompts have the same length.
    """
    began = perf_counter()
    _prefill(context, batch, prompts)
    read = perf_counter()
    rows, n_prompt = list(range(len(prompts))), len(prompts[0])
    token = int(prompts[0][0])
    for position in range(n_prompt, n_prompt + n_new - 1):
        batch.clear()
        batch.add_rows([token] * len(rows), [position] * len(rows), rows)
        context.decode(batch)
    ended = perf_counter()
    for seq_id in rows:
        context.remove(seq_id)
    return Speeds(len(rows) * n_prompt / (read - began), len(rows) * (n_new - 1) / (ended - read))


def _prefill(context: Computation, batch: Batch, prompts: Prompts) -> None:
    batch.clear()
    for seq_id, prompt in enumerate(prompts):
        at = 0
        while at < len(prompt):
            n = min(len(prompt) - at, batch.capacity - batch.n_tokens)
            batch.add_run(prompt[at : at + n], at, seq_id, n_logits=int(at + n == len(prompt)))
            at += n
            if batch.n_tokens == batch.capacity:
                context.decode(batch)
                batch.clear()
    if batch.n_tokens:
        context.decode(batch)


REQUEST_KINDS = {
    "greedy": SamplingParams(temperature=0),
    "sampled": SamplingParams(temperature=0.8, top_k=40, top_p=0.95, min_p=0),
    "defaults": SamplingParams(),
    "penalised": SamplingParams(repetition_penalty=1.1, presence_penalty=0.5),
    "chain": SamplingParams(typical_p=0.9, min_p=0),
    "json": SamplingParams(json_schema={"type": "array", "items": {"type": "number"}, "minItems": 1000}),
    "logprobs": SamplingParams(logprobs=5),
}
"""Kinds of requests with different sampling costs. "chain" uses llama.cpp's own samplers."""


_COLUMNS = [
    Column("kv_layout", "KV layout"), Column("flash_attn", "FA"), Column("kind", "requests"), Column("batch_size", "B"),
    Column("prefill", "prefill tok/s", 0), Column("prefill_of_bare", "% of bare"), Column("decode", "decode tok/s"),
    Column("decode_of_bare", "% of bare"), Column("of_ideal", "of ideal", 3), Column("step_ms", "step ms", 2),
    Column("sample_percent", "sample %", 2), Column("overhead_percent", "not decode %", 2),
    Column("speedup", "x sequential", 2), Column("memory_mib", "MiB", 0), Column("memory_overhead", "% over B=1"),
]  # fmt: skip
_GPU_COLUMN = Column("gpu_percent", "GPU %", 0)
_ENERGY_COLUMN = Column("tokens_per_kwh", "tokens/kWh", 0)
_PRICE_COLUMN = Column("tokens_per_unit", "tokens per unit of money", 0)


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes to measure. Raises `ConfigError` for sizes out of range."""

    batch_sizes: tuple[int, ...] = (1, 4, 8, 16)
    layouts: tuple[str, ...] = ("unified", "per-sequence")
    flash_attns: tuple[str, ...] = ("on", "off")
    kinds: tuple[str, ...] = ("greedy",)
    """Keys of `REQUEST_KINDS`."""
    prompt_tokens: int = 128
    new_tokens: int = 64
    repeats: int = 3

    @property
    def n_cases(self) -> int:
        """Rows of the table."""
        return len(self.batch_sizes) * len(self.layouts) * len(self.flash_attns) * len(self.kinds)

    def __post_init__(self) -> None:
        check_least({"--prompt-tokens": self.prompt_tokens, "--repeats": self.repeats})
        check_least({"--new-tokens": self.new_tokens}, 2)


class PairedRun(msgspec.Struct, frozen=True):
    """One run of the engine and one of the bare loop, in direct succession."""

    engine: Speeds
    bare: Speeds
    phases: dict[str, float]
    """Mean seconds of a decode step, by engine phase."""
    seconds: float
    """The duration of the engine's run, including prompts."""
    joules: float | None
    """Energy of the engine's run; None if unknown."""
    gpu_percent: float | None


def measure_throughput(
    config: EngineConfig,
    sizes: Sizes,
    progress: Callable[[str], object] = lambda line: None,
    energy: EnergySettings | None = None,
) -> Report:
    """Measures all combinations of `sizes`. `config`: all other settings, such as model, device and threads.

    `progress` gets a line for each row, with the total number of rows. `energy`: a given power, and its price. Raises
    `ConfigError` and the engine's exceptions.
    """
    if "off" in sizes.flash_attns and config.cache_type_v not in FLOAT_CACHES:
        raise ConfigError(f"-ctv {config.cache_type_v} requires flash attention: use --flash-attns on")
    config = msgspec.structs.replace(
        config,
        n_ctx=max(sizes.batch_sizes) * (sizes.prompt_tokens + sizes.new_tokens),
        n_parallel=max(sizes.batch_sizes),
        target_itl_ms=60_000,  # so long that prompts are never split in favour of decoding sequences
        prefix_cache=False,  # the bare loop needs an empty context
        spec="off",  # the bare loop does not use drafts
    )
    rows: list[dict[str, Any]] = []
    energy = energy or EnergySettings()
    meter = energy_meter(energy, on_gpu=Backend.get().offloads(config.n_gpu_layers))
    with load_model(config) as model:
        for layout in sizes.layouts:
            for flash_attn in sizes.flash_attns:
                variant = msgspec.structs.replace(config, kv_layout=layout, flash_attn=flash_attn)
                runtime = open_runtime(variant, model)
                with BatchInferenceEngine(variant, runtime=runtime, survives_failures=False) as engine:
                    check_can_run(engine.info, sizes.prompt_tokens, sizes.new_tokens)
                    for row in _rows(engine, runtime, sizes, meter):
                        rows.append({"kv_layout": layout, "flash_attn": flash_attn, **row})
                        progress(f"{len(rows)} of {sizes.n_cases}: {_line(rows[-1])}")
    notes = [
        *_gain_notes(rows, config),
        *_compare_with_sequential(rows),
        *_add_memory(rows, config, sizes),
        *_add_energy(rows, meter, energy),
    ]
    return _report(config, sizes, runtime.info, rows, notes)


def _rows(engine: BatchInferenceEngine, runtime: Runtime, sizes: Sizes, meter: EnergyMeter) -> Iterator[dict[str, Any]]:
    batch = Batch(runtime.context.n_batch)
    for n in sizes.batch_sizes:
        draw = np.random.default_rng(n)
        prompts = [random_prompt(draw, sizes.prompt_tokens, runtime.info.n_vocab) for _ in range(n)]
        for name in sizes.kinds:
            params = msgspec.structs.replace(REQUEST_KINDS[name], ignore_eos=True)
            n_few = min(sizes.new_tokens, 8)  # tokens
            engine_loop(engine, prompts, params, n_few), bare_loop(runtime.context, batch, prompts, n_few)
            runs = []
            for _ in range(sizes.repeats):
                with ResourceUsage() as usage:
                    joules = meter.joules()
                    speeds, phases = engine_loop(engine, prompts, params, sizes.new_tokens)
                    joules = meter.joules() - joules
                bare = bare_loop(runtime.context, batch, prompts, sizes.new_tokens)
                used = joules if meter.works else None
                runs.append(PairedRun(speeds, bare, phases, usage.seconds, used, usage.gpu_percent))
            yield {"batch_size": n, "kind": name, **_figures(runs, n * sizes.new_tokens), **_of_ideal(runs, n, sizes)}


def _of_ideal(runs: list[PairedRun], n: int, sizes: Sizes) -> dict[str, Spread]:
    """The ideal time of the requests divided by the engine's, from the costs of the paired bare loop."""
    requests = [RequestSize(sizes.prompt_tokens, sizes.new_tokens)] * n
    costs = [BareCosts.of([(n, n / run.bare.decode)], [(n, 1 / run.bare.prefill)]) for run in runs]
    needed = [ideal_seconds(requests, each, n) for each in costs]
    return {"of_ideal": Spread.of(ideal_s / run.seconds for ideal_s, run in zip(needed, runs, strict=True))}


def engine_loop(
    engine: BatchInferenceEngine, prompts: Prompts, params: SamplingParams, n_new: int
) -> tuple[Speeds, dict[str, float]]:
    """Runs all prompts at once. Returns the speeds and the mean seconds of a decode step by phase."""
    params = msgspec.structs.replace(params, max_tokens=n_new)
    for prompt in prompts:
        engine.add_request(prompt.tolist(), params)
    began = perf_counter()
    engine.step()
    while any(sequence.n_computed < sequence.n_prompt for sequence in engine.core.scheduler.running):
        engine.step()
    read, before = perf_counter(), engine.stats()
    start = perf_counter()
    while engine.has_work:
        engine.step()
    seconds, after = perf_counter() - start, engine.stats()
    speeds = Speeds(sum(map(len, prompts)) / (read - began), (after.decode_rows - before.decode_rows) / seconds)
    n_steps = after.steps - before.steps
    return speeds, {phase: (after.step_seconds[phase] - before.step_seconds[phase]) / n_steps for phase in PHASES}


def _figures(runs: list[PairedRun], n_tokens: int) -> dict[str, Any]:
    """The figures of a row. `n_tokens`: generated tokens per run.

    The ratios compare the two loops of one paired run, so disturbances of the machine cancel out.
    """
    figures: dict[str, Any] = {}
    for name in Speeds._fields:
        ours = [getattr(run.engine, name) for run in runs]
        bare = [getattr(run.bare, name) for run in runs]
        figures[name], figures[f"bare_{name}"] = Spread.of(ours), Spread.of(bare)
        figures[f"{name}_of_bare"] = Spread.of(100 * a / b for a, b in zip(ours, bare, strict=True))
    steps = [sum(run.phases.values()) for run in runs]
    figures["step_ms"] = Spread.of(1000 * step for step in steps)
    figures["phases_ms"] = {phase: Spread.of(1000 * run.phases[phase] for run in runs) for phase in PHASES}
    for phase, name in (("sample", "sample_percent"), ("decode", "overhead_percent")):
        shares = [100 * run.phases[phase] / step for run, step in zip(runs, steps, strict=True)]
        figures[name] = Spread.of(shares if phase == "sample" else [100 - share for share in shares])
    figures["tokens_per_s"] = Spread.of(n_tokens / run.seconds for run in runs)
    figures["gpu_percent"] = Spread.of_known(run.gpu_percent for run in runs)
    figures["tokens_per_kwh"] = Spread.of_known(
        tokens_per_kwh(n_tokens, run.joules) for run in runs if run.joules is not None
    )
    return figures


def _compare_with_sequential(rows: list[dict[str, Any]]) -> list[str]:
    """Adds the speedup over the same requests one after another. Returns notes."""
    alone = {_variant(row): row["tokens_per_s"].median for row in rows if row["batch_size"] == 1}
    for row in rows:
        before = alone.get(_variant(row))
        row["speedup"] = row["tokens_per_s"].median / before if before else None
    if not alone:
        return ["x sequential: unknown without B = 1 (-B 1,...)."]
    return ["x sequential: generated tokens/s of whole requests, including prompts, relative to B = 1."]


def _gain_notes(rows: list[dict[str, Any]], config: EngineConfig) -> list[str]:
    """Notes on the batch sizes from which batching gains, in the variant with the fastest row."""
    fastest = _variant(max(rows, key=lambda row: row["decode"].median))
    speeds = {row["batch_size"]: row["decode"].median for row in rows if _variant(row) == fastest}
    return gain_notes(speeds, config.model_path, n_gpu_layers=config.n_gpu_layers)


def _variant(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["kv_layout"], row["flash_attn"], row["kind"]


def _add_memory(rows: list[dict[str, Any]], config: EngineConfig, sizes: Sizes) -> list[str]:
    """Adds the memory of an engine with the row's number of sequences, of these lengths. Returns notes."""

    def of(n: int, layout: Any, flash_attn: Any) -> EngineConfig:
        n_ctx = n * (sizes.prompt_tokens + sizes.new_tokens)
        return msgspec.structs.replace(config, n_parallel=n, n_ctx=n_ctx, kv_layout=layout, flash_attn=flash_attn)

    rows_and_one = [[row["batch_size"], 1] for row in rows]
    wanted = [
        of(n, row["kv_layout"], row["flash_attn"]) for row, ns in zip(rows, rows_and_one, strict=True) for n in ns
    ]
    try:
        footprints = iter(estimate_memory(wanted).footprints)
    except EstimateFailed as error:
        return [f"Memory use is unknown: {error}."]
    for row in rows:
        here, one = (sum(b.n_bytes for b in next(footprints).buffers) for _ in range(2))
        row["memory_mib"] = here / 2**20 or None
        row["memory_overhead"] = 100 * (here / one - 1) if here and one else None
    return ["MiB: memory of an engine with -np B and cells for these lengths, including weights."]


def _add_energy(rows: list[dict[str, Any]], meter: EnergyMeter, energy: EnergySettings) -> list[str]:
    """Adds the generated tokens per unit of money. Returns notes."""
    for row in rows:
        known = row["tokens_per_kwh"]
        row["tokens_per_unit"] = energy.tokens_per_unit(known.median) if known else None
    return [meter.source]


def _line(row: dict[str, Any]) -> str:
    where = f"{row['kv_layout']}, flash attention {row['flash_attn']}, {row['kind']}, B = {row['batch_size']}"
    return f"{where}: {row['decode'].text(1)} tok/s, {row['decode_of_bare'].text(1)}% of bare"


def _report(
    config: EngineConfig, sizes: Sizes, info: ModelInfo, rows: list[dict[str, Any]], notes: list[str]
) -> Report:
    optional = [_GPU_COLUMN, _ENERGY_COLUMN, _PRICE_COLUMN]
    return Report(
        kind="throughput",
        title=f"{info.name}: {sizes.prompt_tokens} prompt + {sizes.new_tokens} new tokens, sampling on the "
        f"{'device' if info.sampling == 'backend' else 'host'}",
        machine=this_machine(),
        model=info.name,
        settings={
            **msgspec.to_builtins(sizes),
            "n_batch": config.n_batch,
            "n_ubatch": config.n_ubatch,
            "n_threads": config.n_threads,
            "n_gpu_layers": config.n_gpu_layers,
            "cache_type_k": config.cache_type_k,
            "cache_type_v": config.cache_type_v,
            "sampling": info.sampling,
        },
        columns=[*_COLUMNS, *(each for each in optional if any(row[each.key] is not None for row in rows))],
        rows=rows,
        notes=[
            "bare: llama_decode alone with the same batch, alternately with the engine; ratios are medians over turns.",
            "of ideal: the time of the same prompt tokens and rows in the bare loop, divided by that of the engine.",
            "not decode: the fraction of a step spent outside llama_decode.",
            *notes,
        ],
    )


# --- throughput plot -------------------------------------------------------------------------------------------------


def plot_throughput(report: Report) -> Figure:
    """Plots prefill and decode speed by batch size, with a solid line for the engine and a dashed one for the bare
    loop, and the parts of a step's time."""
    figure, (prefill, decode, split) = new_figure(report, 3)
    for axes, key in ((prefill, "prefill"), (decode, "decode")):
        for name, rows in by_name(report.rows, _name).items():
            sizes = [row["batch_size"] for row in rows]
            line = plot_line(axes, sizes, (row[key] for row in rows), label=name)
            plot_line(axes, sizes, (row[f"bare_{key}"] for row in rows), "--", color=line.get_color())
        axes.set_title(f"{key} tokens/s; dashed: bare llama_decode")
        axes.set_xlabel("sequences at once")
        from_zero(axes)
    decode.legend(fontsize=7)
    _draw_split(split, report.rows)
    return figure


def _name(row: dict[str, Any]) -> str:
    kind = "" if row["kind"] == "greedy" else f", {row['kind']}"
    return f"{row['kv_layout']}, FA {row['flash_attn']}{kind}"


def _draw_split(axes: Any, rows: list[dict[str, Any]]) -> None:
    labels = [f"{_name(row)}, B = {row['batch_size']}" for row in rows]
    left = [0.0] * len(rows)
    for phase in (phase for phase in rows[0]["phases_ms"] if phase != "decode"):
        widths = [1000 * row["phases_ms"][phase].median for row in rows]
        axes.barh(labels, widths, left=left, label=phase)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set_xlim(0, 1.35 * max(left))  # room for the legend
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize=6)
    axes.set_title("microseconds of a step outside llama_decode")
    axes.legend(fontsize=7)
