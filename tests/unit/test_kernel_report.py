"""Which kernels count as batched, and the sentence about a model's types."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import gguf
import numpy as np
import pytest

from cppbatch.models import batch_gain
from cppbatch.models.batch_gain import batch_advice, kernel_report
from cppbatch.models.kernels import KernelTimes
from cppbatch.models.requantize import Matrix
from cppbatch.models.synthetic import LlamaShape
from tests.support import tiny_models

PATH = Path("models/some model.gguf")
TIMES = {  # as on an EPYC with AVX-512, without AMX
    "Q4_1": KernelTimes({1: 0.0166, 4: 0.0656, 16: 0.2582, 256: 4.13}),
    "Q5_1": KernelTimes({1: 0.0186, 4: 0.0738, 16: 0.2886, 256: 4.76}),
    "Q8_0": KernelTimes({1: 0.0131, 4: 0.0274, 16: 0.1031, 256: 1.67}),
    "F16": KernelTimes({1: 0.0160, 4: 0.0250, 16: 0.0848, 256: 1.31}),
    "F32": KernelTimes({1: 0.0375, 4: 0.0677, 16: 0.1450, 256: 1.69}),
    "Q6_K": KernelTimes({1: 0.0124, 4: 0.0454, 16: 0.0813, 256: 0.68}),
    "Q2_K": KernelTimes({1: 0.0091, 4: 0.0233, 16: 0.0851, 256: 1.31}),
}


def matrix(name: str, kind: str, n_elements: int = 1 << 20, *, plain: bool = True, used: float = 1.0) -> Matrix:
    return Matrix(name, kind, n_elements, 256, plain, used)


def advice(matrices: list[Matrix], **changes: str) -> str | None:
    kinds = {each.name: each.kind for each in matrices}
    return batch_advice(PATH, matrices, {name: (kinds[name], new) for name, new in changes.items()}, TIMES)


@pytest.mark.parametrize("kind", ["Q8_0", "F16", "F32", "Q6_K", "Q2_K"])
def test_a_type_of_which_16_rows_cost_clearly_less_than_16_times_one_is_batched(kind: str) -> None:
    assert TIMES[kind].is_batched


@pytest.mark.parametrize("kind", ["Q4_1", "Q5_1"])
def test_a_type_of_which_16_rows_cost_16_times_one_is_not(kind: str) -> None:
    assert not TIMES[kind].is_batched


def test_the_gain_is_how_many_times_faster_a_row_is_in_a_batch_of_16() -> None:
    assert KernelTimes({1: 1.0, 4: 2.0, 16: 4.0, 256: 64.0}).batch_gain == 4.0


def test_the_sentence_counts_the_matrices_and_names_the_remedy() -> None:
    matrices = [matrix("a", "Q4_1"), matrix("b", "Q4_1"), matrix("c", "Q8_0")]
    assert advice(matrices, a="Q8_0", b="Q8_0") == (
        "2 of 3 matrices are Q4_1, which this CPU computes row by row; "
        "`cppbatch models requantize 'models/some model.gguf'` makes matrix products of 16 sequences, and of their "
        "prompts, about 2.0x faster"
    )


def test_all_matrices_are_called_all() -> None:
    text = advice([matrix("a", "Q4_1"), matrix("b", "Q5_1")], a="Q8_0", b="Q8_0") or ""
    assert text.startswith("all 2 matrices are Q4_1 and Q5_1, ")
    assert text.endswith("about 2.7x faster")


def test_the_gain_is_weighted_by_the_elements_of_the_matrices() -> None:
    small, large = matrix("a", "Q4_1", 1 << 10), matrix("b", "Q8_0", 1 << 24)
    assert advice([small, large], a="Q8_0") is None
    assert advice([small._replace(n_elements=1 << 24), large], a="Q8_0")


def test_a_matrix_that_is_only_looked_up_in_does_not_count() -> None:
    embedding = matrix("token_embd.weight", "Q4_1", 1 << 30, plain=False, used=0.0)
    text = advice([embedding, matrix("a", "Q4_1")], a="Q8_0") or ""
    assert text.startswith("1 of 1 matrices")
    assert text.endswith("about 2.5x faster")


def test_experts_count_as_computed_row_by_row_with_the_part_that_a_token_uses() -> None:
    experts = matrix("ffn_up_exps.weight", "Q8_0", 1 << 20, plain=False, used=0.25)
    saved, one_by_one = TIMES["Q4_1"].ms[16] - TIMES["Q8_0"].ms[16], 16 * TIMES["Q8_0"].ms[1] / 4
    gain = 1 + saved / (TIMES["Q8_0"].ms[16] + one_by_one)
    assert (advice([experts, matrix("a", "Q4_1")], a="Q8_0") or "").endswith(f"about {gain:.1f}x faster")


def test_a_type_without_times_counts_as_slow_so_that_the_gain_is_not_overstated() -> None:
    untimed = matrix("b", "IQ2_XXS", 1 << 22)
    assert (advice([matrix("a", "Q4_1"), untimed], a="Q8_0") or "") == ""


def test_without_changes_nothing_is_reported() -> None:
    assert advice([matrix("a", "Q8_0")]) is None


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def times(kinds: Iterable[str]) -> dict[str, KernelTimes]:
        return {kind: TIMES[kind] for kind in kinds if kind in TIMES}

    monkeypatch.setattr(batch_gain, "kernel_times", times)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_gain, "has_gpu", lambda: True)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_gain, "has_gpu", lambda: False)


@pytest.fixture
def q4_1(tmp_path: Path) -> Path:
    return tiny_models.llama(tmp_path / "tiny.gguf", quant="Q4_1")


def test_a_model_of_q4_1_is_advised_where_q4_1_is_computed_row_by_row(q4_1: Path, timed: None) -> None:
    report = kernel_report(q4_1)
    assert report.advice
    assert report.advice.startswith("all 15 matrices are Q4_1")  # 7 in each of 2 layers and the output
    assert str(report) == f"Q4_1 row by row. {report.advice}"
    assert report.as_json()["types"]["Q4_1"]["is_batched"] is False


def test_a_small_model_of_a_batched_type_is_advised_where_another_is_faster_still(tmp_path: Path, timed: None) -> None:
    report = kernel_report(tiny_models.llama(tmp_path / "tiny.gguf", quant="Q8_0"))
    assert (report.advice or "").startswith("all 15 matrices are Q8_0, which this CPU computes slower than F16; ")
    assert str(report).startswith("Q8_0 batched. all 15 matrices")


def test_a_model_of_the_fastest_type_is_not(tmp_path: Path, timed: None) -> None:
    report = kernel_report(tiny_models.llama(tmp_path / "tiny.gguf", quant="F16"))
    assert report.advice is None
    assert str(report) == "F16 batched. Other types would not be faster"


def test_on_a_gpu_nothing_is_recommended(q4_1: Path, timed: None, gpu: None) -> None:
    report = kernel_report(q4_1)
    assert (report.on_gpu, report.advice) == (True, None)
    assert "GPU" in str(report)


def test_without_layers_on_the_gpu_the_cpu_counts(q4_1: Path, timed: None, gpu: None) -> None:
    assert kernel_report(q4_1, n_gpu_layers=0).advice


def test_a_tied_embedding_is_an_output_matrix_too(tmp_path: Path, timed: None) -> None:
    shape = LlamaShape(tied=True)
    report = kernel_report(tiny_models.llama(tmp_path / "tied.gguf", shape=shape, quant="Q4_1"))
    assert report.advice
    assert report.advice.startswith("all 15 matrices are Q4_1")


def test_the_types_of_a_split_model_are_those_of_all_its_parts_without_advice(tmp_path: Path, timed: None) -> None:
    for i, quant in enumerate(("Q4_1", "Q8_0"), 1):
        _part(tmp_path / f"m-{i:05d}-of-00002.gguf", quant)
    report = kernel_report(tmp_path / "m-00001-of-00002.gguf")
    assert report.types.keys() == {"Q4_1", "Q8_0"}
    assert report.advice is None


def _part(path: Path, quant: str) -> None:
    kind = gguf.GGMLQuantizationType[quant]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint16("split.count", 2)
    writer.add_tensor("a.weight", np.zeros((4, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_without_times_the_report_says_so(q4_1: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_gain, "kernel_times", lambda kinds: {})
    assert str(kernel_report(q4_1)) == "not timed"
