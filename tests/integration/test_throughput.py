"""`cppbatch bench throughput` and `strategies`: measurements, refusals, and the output of the figures."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner, Result

from cppbatch import BatchInferenceEngine
from cppbatch.bench.energy import EnergySettings
from cppbatch.bench.prompts import random_prompt
from cppbatch.bench.throughput import REQUEST_KINDS, Sizes, bare_loop, engine_loop, measure_throughput
from cppbatch.cli.main import cli
from cppbatch.config import EngineConfig
from cppbatch.engine.observe.metrics import PHASES
from cppbatch.engine.runtime import load_model
from cppbatch.errors import ConfigError
from cppbatch.llama import Batch, Model
from tests.support.fake_nvml import install
from tests.support.fakes import N_VOCAB, FakeContext, context_of, fake_engine, greedy

SMALL = ["--prompt-tokens", "6", "--new-tokens", "4", "--repeats", "1", "-t", "1"]


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, ["bench", *map(str, arguments)], catch_exceptions=True)


def prompts(n: int, length: int) -> list[np.ndarray]:
    return [random_prompt(np.random.default_rng(i), length, N_VOCAB) for i in range(n)]


@pytest.mark.parametrize("n_batch", [64, 7])
def test_the_bare_loop_computes_what_the_engine_does_and_leaves_the_context_empty(n_batch: int) -> None:
    context = FakeContext(n_ctx=64, n_batch=n_batch, n_seq_max=4, kv_unified=True, sharing="none")
    speeds = bare_loop(context, Batch(n_batch), prompts(4, 10), 5)
    read, written = context.steps[:-4], context.steps[-4:]
    assert sum(sum(step.values()) for step in read) == 40
    assert [sum(step.values()) for step in read[:-1]] == [n_batch] * (len(read) - 1)
    assert written == [{0: 1, 1: 1, 2: 1, 3: 1}] * 4
    assert context.n_used == 0
    assert min(speeds) > 0


def test_the_engine_s_speed_is_of_full_batches() -> None:
    engine = fake_engine(n_ctx=64, n_batch=40, n_parallel=4)
    speeds, phases = engine_loop(engine, prompts(4, 10), greedy(ignore_eos=True), 5)
    assert context_of(engine).steps == [dict.fromkeys((3, 2, 1, 0), 10)] + [dict.fromkeys(range(4), 1)] * 4
    assert tuple(phases) == PHASES
    assert min(speeds) > 0


def test_every_kind_of_requests_has_a_row_for_each_batch_size_layout_and_attention(tiny_llama: Path) -> None:
    sizes = Sizes(batch_sizes=(1, 3), kinds=tuple(REQUEST_KINDS), prompt_tokens=8, new_tokens=4, repeats=2)
    lines: list[str] = []
    report = measure_throughput(EngineConfig(model_path=str(tiny_llama), n_threads=1), sizes, lines.append)
    n = len(report.rows)
    assert [line.partition(":")[0] for line in lines] == [f"{i + 1} of {n}" for i in range(n)]
    seen = [(row["kv_layout"], row["flash_attn"], row["batch_size"], row["kind"]) for row in report.rows]
    assert len(seen) == len(set(seen)) == 2 * 2 * 2 * len(REQUEST_KINDS)
    for row in report.rows:
        assert tuple(row["phases_ms"]) == PHASES
        assert row["decode"].median > 0
        assert row["bare_decode"].low <= row["bare_decode"].median <= row["bare_decode"].high
        assert 0 < row["overhead_percent"].median < 100
    report.table()


def test_a_row_has_its_speedup_its_memory_its_energy_and_its_price(tiny_llama: Path) -> None:
    sizes = Sizes(
        batch_sizes=(1, 4), layouts=("unified",), flash_attns=("on",), prompt_tokens=8, new_tokens=8, repeats=2
    )
    energy = EnergySettings(watts=100, power_price=0.5)
    report = measure_throughput(EngineConfig(model_path=str(tiny_llama), n_threads=1), sizes, energy=energy)
    one, four = report.rows
    assert (one["speedup"], one["memory_overhead"]) == (1, 0)
    assert four["speedup"] == pytest.approx(four["tokens_per_s"].median / one["tokens_per_s"].median)
    assert four["memory_overhead"] == pytest.approx(100 * (four["memory_mib"] / one["memory_mib"] - 1))
    assert four["memory_overhead"] > 0
    for row in report.rows:
        # 100 W for the duration of the run; the time of tokens/s starts a little earlier, and ends later
        assert 1 <= row["tokens_per_kwh"].median / (row["tokens_per_s"].median * 36_000) < 3
        assert row["tokens_per_unit"] == pytest.approx(2 * row["tokens_per_kwh"].median)
    assert "Energy: 100 W as given (--watts)." in report.notes


def test_without_b_1_and_without_counters_the_report_marks_unknown_values(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("cppbatch.bench.energy._POWERCAP", tmp_path)
    install(monkeypatch, None)
    sizes = Sizes(batch_sizes=(2,), layouts=("unified",), flash_attns=("on",), prompt_tokens=4, new_tokens=2, repeats=1)
    report = measure_throughput(EngineConfig(model_path=str(tiny_llama), n_threads=1), sizes)
    (row,) = report.rows
    assert (row["speedup"], row["tokens_per_kwh"], row["tokens_per_unit"]) == (None, None, None)
    assert any(note.startswith("Energy is unknown: ") for note in report.notes)
    assert "x sequential: unknown without B = 1 (-B 1,...)." in report.notes
    assert not {"tokens_per_kwh", "tokens_per_unit", "gpu_percent"} & {column.key for column in report.columns}


def test_one_model_serves_all_contexts(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import cppbatch.bench.throughput as module

    loaded = []

    def load(config: EngineConfig) -> Model:
        loaded.append(load_model(config))
        return loaded[-1]

    monkeypatch.setattr(module, "load_model", load)
    sizes = Sizes(batch_sizes=(2,), prompt_tokens=4, new_tokens=2, repeats=1)
    measure_throughput(EngineConfig(model_path=str(tiny_llama), n_threads=1), sizes)
    assert len(loaded) == 1


@pytest.mark.parametrize("command", ["throughput", "strategies"])
def test_figures_go_to_a_table_a_file_and_an_image(command: str, tiny_llama: Path, tmp_path: Path) -> None:
    few = ["-B", "1,2"] if command == "throughput" else ["--requests", "3", "-np", "2"]
    files: list[str | Path] = ["--json", tmp_path / "figures.json", "--plot", tmp_path / "figures.png"]
    result = run(command, "-m", tiny_llama, *few, *SMALL, *files)
    assert result.exit_code == 0, result.output
    assert "tok/s" in result.stdout
    figures = msgspec.json.decode((tmp_path / "figures.json").read_bytes())
    assert figures["kind"] == command
    assert figures["rows"]
    assert figures["settings"]["repeats"] == 1
    assert (tmp_path / "figures.png").stat().st_size > 10_000


def test_the_speedup_by_drafts_has_a_row_for_each_workload_and_batch_size(tiny_llama: Path, tmp_path: Path) -> None:
    few = "-B 1,5 --workloads quote,job --new-tokens 3 --repeats 1 -t 1 --draft-max 4".split()
    files: list[str | Path] = ["--json", tmp_path / "figures.json", "--plot", tmp_path / "figures.png"]
    result = run("throughput", "--spec", "-m", tiny_llama, *few, *files)
    assert result.exit_code == 0, result.output
    figures = msgspec.json.decode((tmp_path / "figures.json").read_bytes())
    settings = figures["settings"]
    assert (figures["kind"], settings["spec"], settings["draft_max"]) == ("speculation", "auto", 4)
    seen = [(row["workload"], row["batch_size"], row["requests"]) for row in figures["rows"]]
    assert seen == [("quote", 1, 8), ("quote", 5, 10), ("job", 1, 12), ("job", 5, 15)]
    for row in figures["rows"]:
        assert row["speedup"]["median"] == pytest.approx(row["drafted"]["median"] / row["plain"]["median"])
        assert 0 < row["generated_tokens"] <= 3 * row["requests"]
    assert (tmp_path / "figures.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["throughput", "--spec", "off"], "'off' is not one of 'auto', 'suffix', 'draft'"),
        (["throughput", "--spec", "--workloads", "poem"], "one or more of quote, json, code, job, free"),
        (["throughput", "--spec", "--new-tokens", "1"], "--new-tokens is 1; it must be at least 2"),
        (["throughput", "-B", "0,4"], "numbers of at least 1"),
        (["throughput", "-B", "four"], "numbers of at least 1"),
        (["throughput", "--layouts", "paged"], "one or more of unified, per-sequence"),
        (["throughput", "--kinds", "greedy,free"], "one or more of greedy, sampled"),
        (["throughput", "-c", "512"], "No such option"),
        (["throughput", "--new-tokens", "1"], "--new-tokens is 1; it must be at least 2"),
        (["throughput", "--repeats", "0"], "--repeats is 0"),
        (["throughput", "--prompt-tokens", "5000"], "Lower --prompt-tokens"),
        (["throughput", "-ctv", "q8_0"], "use --flash-attns on"),
        (["throughput", "-B", "300"], "number of sequence ids"),
        (["strategies", "--strategies", "static"], "one or more of sequential, concurrent"),
        (["strategies", "--new-tokens", "8-x"], "a number, or a range such as"),
        (["strategies", "--new-tokens", "9-8"], "--new-tokens is 9-8"),
        (["strategies", "--prompt-tokens", "16-5000"], "Lower --prompt-tokens"),
        (["strategies", "--bucket", "0"], "--bucket is 0"),
        (["strategies", "--max-wait-ms", "nan"], "--max-wait-ms is nan"),
    ],
)
def test_invalid_benchmark_options_are_refused_with_the_reason(
    arguments: list[str], message: str, tiny_llama: Path
) -> None:
    result = run(*arguments, "-m", tiny_llama)
    assert result.exit_code != 0
    assert message in result.output + str(result.exception)


def test_the_help_names_every_kind_of_requests() -> None:
    assert ", ".join(REQUEST_KINDS) in " ".join(run("throughput", "--help").output.split())


def test_a_model_that_gives_vectors_is_refused(tiny_reranker: Path) -> None:
    for command in ("throughput", "strategies"):
        assert isinstance(run(command, "-m", tiny_reranker).exception, ConfigError)


def test_a_runtime_over_a_loaded_model_leaves_the_model_open(tiny_llama: Path) -> None:
    from cppbatch.engine.runtime import load_model, open_runtime

    config = EngineConfig(model_path=str(tiny_llama), n_ctx=256, n_parallel=2, n_threads=1)
    texts = []
    with load_model(config) as model:
        for _ in range(2):
            with BatchInferenceEngine(config, runtime=open_runtime(config, model)) as engine:
                texts.append(engine.generate(["the cat"], greedy(6, ignore_eos=True))[0].tokens)
        assert model.handle
    assert texts[0] == texts[1]
