"""When weights are not repacked: the rule, its sentence, and where it does not apply."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import gguf
import pytest

from cppbatch import EngineConfig
from cppbatch.errors import ConfigError, ModelError
from cppbatch.models import kernels
from cppbatch.models.kernels import KernelTimes, why_not_repacked
from tests.unit.test_requantize import Shapes, gguf_file

EPYC = {  # AVX-512 with VNNI, no AMX: microseconds for a million weights (docs/decisions/0028)
    "Q4_K": KernelTimes({1: 16.8, 4: 39.0, 16: 125.0, 256: 1920.0}, {1: 22.3, 4: 89.0, 16: 101.0, 256: 1040.0}),
    "Q2_K": KernelTimes({1: 17.0, 4: 49.0, 16: 166.0, 256: 2620.0}, {1: 19.0, 4: 75.0, 16: 112.0, 256: 1230.0}),
    "Q4_0": KernelTimes({1: 19.0, 4: 32.0, 16: 101.0, 256: 1630.0}, {1: 24.0, 4: 96.0, 16: 384.0, 256: 6100.0}),
    "Q6_K": KernelTimes({1: 22.2, 4: 88.0, 16: 158.0, 256: 1310.0}),
    "Q8_0": KernelTimes({1: 25.5, 4: 54.0, 16: 209.0, 256: 3280.0}),
}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Times as on the EPYC; lists the types that are asked for."""
    return with_times(monkeypatch, EPYC)


def with_times(monkeypatch: pytest.MonkeyPatch, times: Mapping[str, KernelTimes]) -> list[list[str]]:
    asked: list[list[str]] = []

    def kernel_times(kinds: Iterable[str]) -> dict[str, KernelTimes]:
        asked.append(list(kinds))
        return {kind: times[kind] for kind in asked[-1] if kind in times}

    monkeypatch.setattr(kernels, "kernel_times", kernel_times)
    return asked


def model(folder: Path, *kinds: str, more: Shapes | None = None) -> Path:
    """A model with one matrix of each type."""
    tensors = {f"blk.{i}.attn_q.weight": (kind, (256, 256)) for i, kind in enumerate(kinds)}
    return gguf_file(folder / "model.gguf", {**tensors, **(more or {})}, gguf.LlamaFileType.GUESSED)


@pytest.mark.parametrize("kind", ["Q4_K", "Q2_K"])
@pytest.mark.parametrize("n_parallel", [16, 32, 256])
def test_types_that_batch_faster_as_they_are_in_the_file_are_not_repacked(
    asked: object, tmp_path: Path, kind: str, n_parallel: int
) -> None:
    assert why_not_repacked(model(tmp_path, kind), n_parallel)


@pytest.mark.parametrize("n_parallel", [1, 2, 4])
@pytest.mark.parametrize("kind", EPYC)
def test_few_sequences_get_repacked_weights_without_any_timing(
    asked: list[list[str]], tmp_path: Path, kind: str, n_parallel: int
) -> None:
    assert why_not_repacked(model(tmp_path, kind), n_parallel) is None
    assert asked == []


@pytest.mark.parametrize("kind", ["Q4_0", "Q6_K", "Q8_0"])
def test_types_that_are_faster_repacked_or_never_repacked_are_left_to_llama_cpp(
    asked: object, tmp_path: Path, kind: str
) -> None:
    assert all(why_not_repacked(model(tmp_path, kind), n) is None for n in (5, 16, 256))


def test_the_types_of_all_matrices_count_by_their_size(asked: object, tmp_path: Path) -> None:
    assert why_not_repacked(model(tmp_path, "Q4_K", "Q4_K", "Q6_K"), 16)
    large = {"blk.9.ffn_up.weight": ("Q4_0", (4096, 256))}
    assert why_not_repacked(model(tmp_path, "Q4_K", more=large), 16) is None


def test_a_table_that_is_only_looked_up_does_not_count_and_neither_do_experts_vectors_or_floats(
    asked: list[list[str]], tmp_path: Path
) -> None:
    others: Shapes = {
        "token_embd.weight": ("Q4_0", (4096, 256)),
        "output.weight": ("Q6_K", (256, 256)),
        "blk.0.ffn_up_exps.weight": ("Q2_K", (8, 256, 256)),
        "blk.0.attn_norm.weight": ("F32", (256,)),
        "blk.0.ffn_gate_inp.weight": ("F16", (8, 256)),
    }
    assert why_not_repacked(model(tmp_path, "Q4_K", more=others), 16)
    assert [sorted(kinds) for kinds in asked] == [["Q4_K", "Q6_K"]]


def test_a_table_that_is_the_output_too_counts(asked: list[list[str]], tmp_path: Path) -> None:
    why_not_repacked(model(tmp_path, "Q4_K", more={"token_embd.weight": ("Q4_0", (256, 256))}), 16)
    assert [sorted(kinds) for kinds in asked] == [["Q4_0", "Q4_K"]]


@pytest.mark.parametrize(("part", "is_repacked"), [(0.97, True), (0.94, False)])
def test_a_gain_of_less_than_5_percent_is_not_enough(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, part: float, is_repacked: bool
) -> None:
    ms = EPYC["Q4_K"].ms
    with_times(monkeypatch, {"Q4_K": KernelTimes(ms, {rows: part * each for rows, each in ms.items()})})
    assert (why_not_repacked(model(tmp_path, "Q4_K"), 16) is None) == is_repacked


@pytest.mark.parametrize("times", [{}, {"Q6_K": EPYC["Q6_K"]}, {"Q4_K": KernelTimes(EPYC["Q4_K"].ms)}])
def test_without_times_weights_are_repacked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, times: dict[str, KernelTimes]
) -> None:
    with_times(monkeypatch, times)
    assert why_not_repacked(model(tmp_path, "Q4_K", "Q6_K"), 16) is None


def test_models_of_floats_need_no_timing(asked: list[list[str]], tmp_path: Path) -> None:
    assert why_not_repacked(model(tmp_path, "F32", "BF16"), 16) is None
    assert [kinds for kinds in asked if kinds] == []


def test_the_sentence_names_the_types_the_gain_and_what_one_sequence_loses(asked: object, tmp_path: Path) -> None:
    assert why_not_repacked(model(tmp_path, "Q4_K", "Q6_K"), 16) == (
        "weights are not repacked: matrix products of 16 sequences and their prompts are about 1.2x faster with Q4_K "
        "as in the file; with `--repack on`, one sequence alone is about 1.1x faster"
    )


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"none\.gguf"):
        why_not_repacked(tmp_path / "none.gguf", 16)


def test_the_setting_takes_three_values() -> None:
    with pytest.raises(ConfigError, match=r"^repack \(--repack\) is 'no'; it must be one of auto, on, off"):
        EngineConfig("model.gguf", repack="no")  # type: ignore[arg-type]
