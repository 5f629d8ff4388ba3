"""Other types of weights: what changes, what is copied byte for byte, and the state after a failure."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import psutil
import pytest
from click.testing import CliRunner

from cppbatch.bench.quality import CONTEXT, compare_text, english_text
from cppbatch.cli.models_command import models
from cppbatch.engine.engine import BatchInferenceEngine
from cppbatch.engine.params import SamplingParams
from cppbatch.errors import ModelError
from cppbatch.llama import Batch, Context, Model
from cppbatch.llama.quantize_child import quantize
from cppbatch.models.inspect import read_gguf
from cppbatch.models.kernels import KernelTimes
from cppbatch.models.requantize import Requantization, part_folder, plan_auto, plan_type, requantize
from cppbatch.models.synthetic import LlamaShape, write_llama

SHAPE = LlamaShape(n_layer=2, n_embd=256, n_head=4, n_head_kv=4, n_ff=512)  # rows of whole blocks of K types
Q6_K = ("blk.0.ffn_down.weight", "blk.1.ffn_down.weight", "output.weight")


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small file with the types of a Q4_K_M."""
    folder = tmp_path_factory.mktemp("mixed")
    floats = write_llama(folder / "floats.gguf", SHAPE)
    return quantize(floats, folder / "tiny.Q4_K_M.gguf", "Q4_K", dict.fromkeys(Q6_K, "Q6_K"))


def tensors(path: Path) -> dict[str, tuple[str, Any]]:
    """{tensor: its type, its bytes}."""
    return {tensor.name: (tensor.tensor_type.name, tensor.data) for tensor in read_gguf(path).tensors}


def metadata(path: Path) -> dict[str, Any]:
    reader = read_gguf(path)
    return {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}


def greedy_text(path: Path) -> str:
    with BatchInferenceEngine(str(path), n_ctx=256, n_parallel=2, n_threads=1) as engine:
        return engine.generate(["Once"], SamplingParams(max_tokens=8, temperature=0))[0].text


# --- what a killed process leaves ---


def test_the_next_run_removes_what_a_killed_one_left_but_nothing_that_is_being_written(
    mixed: Path, tmp_path: Path
) -> None:
    killed = """if True:
        import os, pathlib, sys
        from cppbatch.models.requantize import part_folder
        with part_folder(pathlib.Path(sys.argv[1])) as folder:
            (folder / "half.gguf").write_text("half a model")
            os.kill(os.getpid(), 9)
    """
    assert subprocess.run([sys.executable, "-c", killed, tmp_path], check=False).returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert (left / "half.gguf").exists()
    with part_folder(tmp_path) as ours:
        assert list(tmp_path.iterdir()) == [ours]
        plan = plan_type(mixed, "F16", lossy=True)
        requantize(plan, tmp_path / "out.gguf")
        assert sorted(tmp_path.iterdir()) == sorted([ours, tmp_path / "out.gguf"])


# --- llama.cpp's quantiser ---


def test_only_the_named_tensors_change_and_all_others_are_copied_byte_for_byte(mixed: Path, tmp_path: Path) -> None:
    before = tensors(mixed)
    after = tensors(quantize(mixed, tmp_path / "out.gguf", "Q4_K", dict.fromkeys(Q6_K, "Q8_0")))
    assert {name for name in before if before[name][0] != after[name][0]} == set(Q6_K)
    assert {after[name][0] for name in Q6_K} == {"Q8_0"}
    assert all(np.array_equal(before[name][1], after[name][1]) for name in before.keys() - set(Q6_K))


def test_metadata_and_vocabulary_stay_and_text_can_be_generated(mixed: Path, tmp_path: Path) -> None:
    out = quantize(mixed, tmp_path / "out.gguf", "Q4_K", dict.fromkeys(Q6_K, "Q8_0"))
    assert metadata(out) == metadata(mixed)
    assert greedy_text(out)


def test_tensors_of_two_bits_are_copied_although_making_them_needs_an_importance_matrix(
    mixed: Path, tmp_path: Path
) -> None:
    two_bits = with_tensor(mixed, tmp_path / "two-bits.gguf", "blk.1.attn_q.weight", "IQ2_XXS")
    stays = {name: kind for name, (kind, _) in tensors(two_bits).items() if kind == "IQ2_XXS"}
    assert stays
    out = quantize(two_bits, tmp_path / "out.gguf", "Q4_K", stays | dict.fromkeys(Q6_K, "Q8_0"))
    assert {name: kind for name, (kind, _) in tensors(out).items() if kind == "IQ2_XXS"} == stays


def with_tensor(source: Path, target: Path, name: str, kind: str) -> Path:
    """A copy of a model in which one matrix is all zeros, of another type."""
    reader = read_gguf(source)
    writer = gguf.GGUFWriter(target, "llama")
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            writer.add_key_value(key, field.contents(), field.types[0], field.types[-1])
    for tensor in reader.tensors:
        data, dtype = tensor.data, tensor.tensor_type
        if tensor.name == name:
            dtype = gguf.GGMLQuantizationType[kind]
            block, size = gguf.GGML_QUANT_SIZES[dtype]
            data = np.zeros((int(tensor.shape[1]), int(tensor.shape[0]) // block * size), np.uint8)
        writer.add_tensor(tensor.name, data, raw_dtype=dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


# --- writing the file ---


@pytest.fixture
def plan(mixed: Path, tmp_path: Path) -> Requantization:
    source = tmp_path / "tiny.Q4_K_M.gguf"
    shutil.copy(mixed, source)
    kernels = dict.fromkeys(("Q4_K", "Q8_0"), KernelTimes({1: 1.0, 4: 2.0, 16: 4.0, 256: 32.0}))
    return plan_auto(source, lambda _kinds: {**kernels, "Q6_K": KernelTimes({n: float(n) for n in (1, 4, 16, 256)})})


def test_the_written_file_has_the_planned_types_and_about_the_planned_size(plan: Requantization) -> None:
    seen: list[int] = []
    out = requantize(plan, plan.output, written=seen.append)
    assert out.name == "tiny.Q4_K_M-Q8_0.gguf"
    before, after = tensors(plan.source), tensors(out)
    assert {name: (before[name][0], after[name][0]) for name in plan.changes} == plan.changes
    assert all(np.array_equal(before[name][1], after[name][1]) for name in before.keys() - plan.changes.keys())
    assert abs(out.stat().st_size - plan.n_bytes) < 1024
    assert all(n <= out.stat().st_size for n in seen)
    assert sorted(out.parent.iterdir()) == sorted([plan.source, out])


def test_an_interrupted_run_leaves_nothing_and_the_process_ends(
    plan: Requantization, monkeypatch: pytest.MonkeyPatch
) -> None:
    children: list[subprocess.Popen[bytes]] = []

    class Recorded(subprocess.Popen):  # type: ignore[type-arg]
        def wait(self, timeout: float | None = None) -> int:
            if self not in children:
                children.append(self)
                raise KeyboardInterrupt
            return super().wait(timeout)

    monkeypatch.setattr(subprocess, "Popen", Recorded)
    with pytest.raises(KeyboardInterrupt):
        requantize(plan, plan.output)
    assert [child.returncode for child in children] == [-signal.SIGKILL]
    assert list(plan.source.parent.iterdir()) == [plan.source]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_command_that_is_ended_by_a_signal_leaves_no_file_and_no_process(
    plan: Requantization, number: signal.Signals
) -> None:
    slow = """if True:
        import sys
        from cppbatch.cli import main
        from cppbatch.models import requantize
        class Sleeping(requantize.subprocess.Popen):
            def __init__(self, command, **settings):
                super().__init__([sys.executable, "-c", "import time; time.sleep(60)"], **settings)
            def wait(self, timeout=None):
                print(self.pid, flush=True)
                return super().wait(timeout)
        requantize.subprocess.Popen = Sleeping
        main()
    """
    command = [sys.executable, "-c", slow, "models", "requantize", str(plan.source), "--type", "Q8_0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout
        child = int(process.stdout.readline())
        process.send_signal(number)
        assert process.wait(timeout=30) == 130
    assert not psutil.pid_exists(child)
    assert list(plan.source.parent.iterdir()) == [plan.source]


def test_two_processes_at_once_leave_one_whole_file(plan: Requantization) -> None:
    with ThreadPoolExecutor(4) as pool:
        outs = list(pool.map(lambda _i: requantize(plan, plan.output, overwrite=True), range(4)))
    assert set(outs) == {plan.output}
    assert sorted(plan.source.parent.iterdir()) == sorted([plan.source, plan.output])
    assert greedy_text(plan.output)


def test_a_file_that_exists_is_replaced_only_if_that_is_asked_for(plan: Requantization) -> None:
    plan.output.write_bytes(b"something else")
    with pytest.raises(ModelError, match="--overwrite"):
        requantize(plan, plan.output)
    assert plan.output.read_bytes() == b"something else"
    requantize(plan, plan.output, overwrite=True)
    assert greedy_text(plan.output)


def test_an_error_of_the_quantiser_is_reported_and_leaves_nothing(plan: Requantization) -> None:
    data = plan.source.read_bytes()
    plan.source.write_bytes(data[: len(data) // 2])
    with pytest.raises(
        ModelError, match=r"tiny\.Q4_K_M\.gguf cannot be requantised \(code 1\): .*is damaged or truncated"
    ):
        requantize(plan, plan.output)
    assert list(plan.source.parent.iterdir()) == [plan.source]


# --- the command ---


def test_the_command_writes_the_file_and_compares_both(tiny_llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    result = CliRunner().invoke(
        models, ["requantize", str(tiny_llama), "--type", "q8_0", "--lossy", "-o", str(out), "--json"]
    )
    assert result.exit_code == 0, result.output
    assert f"wrote {out}" in result.stderr
    before, after = json.loads(result.stdout)["rows"]
    assert (before["name"], after["name"]) == (tiny_llama.name, "out.gguf")
    assert after["size_mb"] == out.stat().st_size / 1e6 < before["size_mb"]
    assert after["weights_mib"] < before["weights_mib"]
    for row in (before, after):
        assert min(row[name]["low"] for name in ("decode_1", "decode_16", "prefill")) > 0
    assert after["perplexity"] == pytest.approx(before["perplexity"], rel=0.05)
    assert 0 < after["kl_divergence"] < 0.1
    assert after["same_top_percent"] > 80


def test_a_model_that_returns_vectors_is_requantised_and_has_no_speed_of_text(
    tiny_encoder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.gguf"
    arguments = ["requantize", str(tiny_encoder), "--type", "Q8_0", "--lossy", "-o", str(out), "--json"]
    result = CliRunner().invoke(models, arguments)
    assert result.exit_code == 0, result.output
    assert set(json.loads(result.stdout)["rows"][1]) == {"name", "size_mb", "weights_mib"}
    with BatchInferenceEngine(str(out), n_ctx=256, n_threads=1) as engine:
        assert len(engine.embed(["Hello"])) == 1


# --- how two models predict a text ---


def test_a_model_compared_with_itself_has_no_divergence(make_context: Callable[..., Context]) -> None:
    tokens = np.arange(5, 5 + 40, dtype=np.int32)
    first, second = make_context(n_ctx=CONTEXT), make_context(n_ctx=CONTEXT)
    (same,) = compare_text(first, [second], tokens)
    assert same.n_scored == 19
    assert same.perplexity == same.source_perplexity > 1
    assert (same.kl_divergence, same.same_top) == (0.0, 1.0)
    assert first.last_position(0) == -1


def test_the_figures_are_those_of_their_definitions(
    make_context: Callable[..., Context], tiny_llama: Path, tmp_path: Path
) -> None:
    tokens = np.random.default_rng(0).integers(5, 200, 2 * CONTEXT - 100, dtype=np.int32)
    with Model(quantize(tiny_llama, tmp_path / "q4.gguf", "Q4_0")) as other:
        first, second = make_context(n_ctx=CONTEXT), make_context(other, n_ctx=CONTEXT)
        (found,) = compare_text(first, [second], tokens, bos=1)
        p, q, following = [], [], []
        for part in np.array_split(tokens, 2):
            context = np.concatenate([np.array([1], np.int32), part])
            scored = slice(len(context) // 2, len(context) - 1)
            p.append(log_probs(first, context)[scored])
            q.append(log_probs(second, context)[scored])
            following.append(context[scored.start + 1 : scored.stop + 1])
    log_p, log_q, ids = np.concatenate(p), np.concatenate(q), np.concatenate(following)
    rows = np.arange(len(ids))
    assert found.n_scored == len(ids)
    assert found.source_perplexity == pytest.approx(np.exp(-log_p[rows, ids].mean()), rel=1e-3)
    assert found.perplexity == pytest.approx(np.exp(-log_q[rows, ids].mean()), rel=1e-3)
    assert found.kl_divergence == pytest.approx((np.exp(log_p) * (log_p - log_q)).sum(axis=1).mean(), rel=1e-2)
    assert found.same_top == pytest.approx((log_p.argmax(axis=1) == log_q.argmax(axis=1)).mean(), abs=0.01)


def log_probs(context: Context, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.float64]:
    """The log-probabilities after each token, in float64, computed one token at a time."""
    rows, batch = [], Batch(1)
    for position, token in enumerate(tokens):
        batch.clear()
        batch.add_run(np.array([token], np.int32), position, 0, n_logits=1)
        context.decode(batch)
        logits = context.logits(1)[0].astype(np.float64)
        rows.append(logits - logits.max() - np.log(np.exp(logits - logits.max()).sum()))
    context.clear()
    return np.stack(rows)


def test_the_text_that_is_shipped_is_in_the_package() -> None:
    assert 1500 < len(english_text().split()) < 2000
