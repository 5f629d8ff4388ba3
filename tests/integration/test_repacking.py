"""Repacked weights and weights as they are in the file: the same model, and the choice between them."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from cppbatch import BatchInferenceEngine, EngineConfig
from cppbatch.cli.doctor_command import doctor
from cppbatch.engine.runtime import load_model
from cppbatch.llama import Backend, Batch, Context, Model
from cppbatch.llama.kernels_child import encode
from cppbatch.models import attention_times, kernels
from cppbatch.models.kernels import Measured
from cppbatch.models.synthetic import LlamaShape, write_llama
from cppbatch.sizing import estimate_child
from cppbatch.sizing.buffers import read_buffers

SHAPE = LlamaShape(n_layer=2, n_embd=256, n_head=4, n_head_kv=2, n_ff=512)  # rows of whole blocks of K types
REPACKED = {1: 17.0, 4: 39.0, 16: 125.0, 256: 1920.0}
PLAIN = {1: 22.0, 4: 89.0, 16: 101.0, 256: 1040.0}


@pytest.fixture(scope="module")
def q4_k(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("models") / "tiny.gguf", SHAPE, quant="Q4_K", encode=encode)


@pytest.fixture
def faster_plain(empty_cache: Path) -> None:
    """Cached times of a CPU that computes batches of Q4_K faster if they are not repacked."""
    path = kernels.times_path()
    assert path is not None
    path.parent.mkdir(parents=True)
    path.write_bytes(msgspec.json.encode(Measured({"Q4_K": REPACKED}, {"Q4_K": PLAIN}, has_gpu=False)))


def config(path: Path, n_parallel: int = 16, **settings: object) -> EngineConfig:
    small = EngineConfig(str(path), n_ctx=4096, n_parallel=n_parallel, n_threads=1, n_gpu_layers=0)
    return replace(small, **settings)


def logits(path: Path, n: int, *, repack: bool) -> npt.NDArray[np.float32]:
    """Of every token of a prompt."""
    batch = Batch(n)
    batch.add_run(np.arange(3, 3 + n, dtype=np.int32), 0, 0, n_logits=n)
    with Model(path, n_gpu_layers=0, repack=repack) as model, Context(model, n_ctx=256, n_threads=1) as context:
        context.decode(batch)
        return np.array(context.logits(n))


@pytest.mark.parametrize("n", [1, 4, 40])
def test_both_ways_have_the_same_logits_but_for_rounding(q4_k: Path, n: int) -> None:
    """Activations are rounded to 8 bits, so a last bit can grow. Unrelated rows would differ by 1.4 deviations."""
    repacked, plain = logits(q4_k, n, repack=True), logits(q4_k, n, repack=False)
    assert repacked.std() > 0
    assert np.sqrt(((repacked - plain) ** 2).mean(axis=1)).max() < 0.05 * repacked.std()


@pytest.mark.parametrize("n", [1, 40])
def test_floats_are_computed_identically_both_ways(tmp_path: Path, n: int) -> None:
    floats = write_llama(tmp_path / "floats.gguf", SHAPE)
    assert np.array_equal(logits(floats, n, repack=True), logits(floats, n, repack=False))


def test_auto_follows_the_times_and_the_number_of_sequences(q4_k: Path, faster_plain: None) -> None:
    def why(**settings: object) -> str | None:
        with BatchInferenceEngine(config(q4_k, **settings)) as engine:  # type: ignore[arg-type]
            return engine.info.not_repacked

    assert "faster with Q4_K as in the file" in (why() or "")
    assert why(n_parallel=4) is None
    assert why(repack="on") is None
    assert why(repack="off") is None


def test_without_times_weights_are_repacked(q4_k: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "child_command", lambda types: ["false"])
    with load_model(config(q4_k)) as model:
        assert model.repack


def test_memory_is_predicted_for_the_weights_that_are_loaded(q4_k: Path, faster_plain: None) -> None:
    configs = [config(q4_k), config(q4_k, 4), config(q4_k, repack="on"), config(q4_k, repack="off")]
    weights = []
    for each, footprint in zip(configs, estimate_child.footprints(configs), strict=True):
        with Backend.get().lines() as lines, load_model(each):
            loaded = {b.buffer_type: b.n_bytes for b in read_buffers(lines) if b.kind == "weights"}
        predicted = {b.buffer_type: b.n_bytes for b in footprint.buffers if b.kind == "weights"}
        assert predicted == pytest.approx(loaded, rel=0.01, abs=2**20 // 100)
        weights.append(predicted)
    auto, few, on, off = weights
    assert auto == off
    assert few == on


@pytest.mark.usefixtures("untimed_kernels")
def test_doctor_reports_that_weights_are_not_repacked(
    q4_k: Path, faster_plain: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CPPBATCH_MODELS", str(q4_k.parent))
    monkeypatch.setattr(attention_times, "child_command", lambda: ["false"])  # attention is not timed
    result = CliRunner().invoke(doctor)
    assert "weights are not repacked: matrix products of 16 sequences" in result.output
    assert result.exit_code == 0
