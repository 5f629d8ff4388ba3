"""The lines before a model is loaded: what runs where, with how many sequences, in which memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from cppbatch.cli import plan_start as start_lines
from cppbatch.cli.output import format_count
from cppbatch.cli.plan_start import model_line, plan_start, sizes_line
from cppbatch.config import EngineConfig
from cppbatch.models.inspect import ModelFacts, inspect_model
from cppbatch.sizing import memory_check
from cppbatch.sizing.buffers import MAPPED, Buffer
from cppbatch.sizing.estimate import Device, Footprint, MemoryEstimate
from cppbatch.sizing.profile import TunedSettings, save_profile
from tests.support import tiny_projectors

GIB = 2**30
CONFIG = EngineConfig("models/Some-8B.Q4_K_M.gguf", n_threads=6)
GPU = Device("CUDA0", "NVIDIA H100 80GB HBM3", 79 * GIB, 80 * GIB)
FACTS = ModelFacts(
    path="models/Some-8B.Q4_K_M.gguf", architecture="llama", name=None, license=None, size_bytes=4_920_000_000,
    n_params=8_030_000_000, n_ctx_train=8192, n_layer=32, n_embd=1, n_head=1, n_head_kv=1, n_vocab=1,
    tensor_types={"F32": 100, "Q4_K": 90}, main_type="Q4_K", file_type="Q4_K_M", has_chat_template=True, pooling=None,
)  # fmt: skip


def estimate(place: str = "CPU", *, sequence_cells: int = 16384, n: int = 1) -> MemoryEstimate:
    weights = Buffer("weights", MAPPED if place == "CPU" else place, 5 * GIB)
    buffers = [weights, Buffer("cells", place, 2 * GIB), Buffer("process", "CPU", GIB)]
    footprint = Footprint(buffers=buffers, sequence_cells=sequence_cells, n_layers=32, n_ctx_train=8192)
    return MemoryEstimate([footprint] * n, [GPU])


def test_the_model_its_weights_and_the_device() -> None:
    line = "Some-8B.Q4_K_M: 8.0B weights, mostly Q4_K, 4.92 GB"
    assert model_line(CONFIG, FACTS, estimate()) == f"{line}; on the CPU with 6 threads"
    assert model_line(CONFIG, FACTS, estimate("CUDA0")) == f"{line}; all 32 layers on CUDA0 (NVIDIA H100 80GB HBM3)"
    assert model_line(CONFIG, FACTS, None) == line


@pytest.mark.parametrize(("write", "kinds"), [(tiny_projectors.vision, "images"), (tiny_projectors.audio, "audio")])
def test_a_projector_is_named_after_its_kind_of_media(
    tmp_path: Path, write: Callable[[Path], Path], kinds: str
) -> None:
    config = replace(CONFIG, mmproj=str(write(tmp_path / "mmproj.gguf")))
    assert model_line(config, FACTS, None) == f"Some-8B.Q4_K_M: 8.0B weights, mostly Q4_K, 4.92 GB, with {kinds}"


def test_several_engines_divide_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_lines, "available_threads", lambda: 8)
    line = model_line(replace(CONFIG, n_threads=0), FACTS, estimate(n=2))
    assert line.endswith("on the CPU with 4 threads each")


def test_layers_that_are_not_on_the_gpu_are_counted() -> None:
    line = model_line(replace(CONFIG, n_gpu_layers=20), FACTS, estimate("CUDA0"))
    assert line.endswith("20 of 32 layers on CUDA0 (NVIDIA H100 80GB HBM3), the others on the CPU with 6 threads")


def test_sequences_tokens_and_memory() -> None:
    assert sizes_line(CONFIG, estimate(), 20 * GIB, chosen=True) == (
        "16 answers at once, 1,024 tokens each, or up to 8,192 for one, uses 8.6 of 21.5 GB free memory "
        "(16 sequences, 16,384 KV cells: -np 16 -c 16384, chosen to fit into memory)"
    )
    line = sizes_line(replace(CONFIG, n_parallel=1), estimate("CUDA0"), 20 * GIB, chosen=False)
    assert line == (
        "1 answer at a time, up to 8,192 tokens each, uses 1.1 of 21.5 GB free memory and 7.5 of 84.8 GB of CUDA0 "
        "(1 sequence, 16,384 KV cells: -np 1 -c 16384)"
    )
    assert " in each of 2 engines, " in sizes_line(CONFIG, estimate(n=2), 20 * GIB, chosen=False)


def test_numbers_of_weights() -> None:
    assert [format_count(n) for n in (5_000, 134_515_008, 8_030_261_248)] == ["5,000", "135M", "8.0B"]


@pytest.fixture
def config(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> EngineConfig:
    """A model in a machine without a GPU."""
    monkeypatch.setattr(memory_check, "estimate_memory", lambda configs: estimate(n=len(configs)))
    monkeypatch.setattr(memory_check, "free_host_memory", lambda: 20 * GIB)
    monkeypatch.setattr("cppbatch.sizing.sizes.has_gpu", lambda: False)
    monkeypatch.setattr("cppbatch.sizing.sizes.kernel_times", lambda types: {})
    return EngineConfig(str(tiny_llama))


def planned(config: EngineConfig, given: set[str], *, profile: bool = True) -> tuple[EngineConfig, list[str]]:
    lines: list[str] = []
    used = plan_start(config, given, lambda one: [one], use_profile=profile, memory_check=True, say=lines.append)
    return used, lines


def test_two_lines_and_the_way_to_a_profile(config: EngineConfig) -> None:
    used, (model, sizes, hint) = planned(config, set())
    assert (used.n_parallel, used.n_ctx) == (16, 16384)
    assert model.startswith("tiny-llama: ")
    assert "chosen to fit into memory" in sizes
    assert "`cppbatch tune` finds the fastest settings" in hint


def test_an_engine_that_returns_vectors_has_neither_sizes_nor_a_profile(config: EngineConfig) -> None:
    _, lines = planned(replace(config, pooling="mean"), set())
    assert len(lines) == 1


def test_sizes_that_are_given_are_not_called_chosen(config: EngineConfig) -> None:
    _, (_, sizes, _) = planned(config, {"n_parallel", "n_ctx"})
    assert "chosen" not in sizes


def test_a_profile_decides_the_sizes(config: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPPBATCH_CONFIG", str(tmp_path))
    tuned = TunedSettings(n_parallel=8, n_ctx=8192, kv_layout="auto", flash_attn="auto", n_ubatch=512, n_threads=0)
    save_profile(config, tuned, {})
    used, lines = planned(config, set())
    assert (used.n_parallel, used.n_ctx) == (8, 8192)
    assert len(lines) == 3
    assert lines[0].startswith("using the profile ")
    assert "chosen" not in lines[2]
    assert planned(config, set(), profile=False)[0].n_parallel == 16
    assert planned(replace(config, n_parallel=4), {"n_parallel"})[0].n_ctx == 16384


def test_the_type_of_most_weights_is_not_that_of_most_tensors(tiny_llama: Path) -> None:
    facts = inspect_model(tiny_llama)
    assert facts.main_type in facts.tensor_types
    assert facts.size_bytes == tiny_llama.stat().st_size
