"""The default model with weights that batch well: nearly the same text, faster in batches."""

from __future__ import annotations

from pathlib import Path

import pytest

from cppbatch.bench.quality.compare_files import compare_files
from cppbatch.bench.report import Report
from cppbatch.models.kernels import has_gpu, kernel_times
from cppbatch.models.pull import choose_model
from cppbatch.models.requantize import EXACT, plan_type, requantize, target_type
from tests.conftest import once_a_run


@pytest.fixture(scope="module")
def suited_type() -> str:
    """The type that the default model has on this machine; Q8_0 where the downloaded file is used as it is."""
    times = kernel_times(["Q4_1", *EXACT])
    found = target_type("Q4_1", times, is_small=True)
    return "Q8_0" if found == "Q4_1" or has_gpu() else found


@pytest.fixture(scope="module")
def compared(suited_type: str, default_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Report:
    """The default model beside a copy with other weights."""
    plan = plan_type(default_source, suited_type)
    copy = once_a_run(tmp_path_factory, f"default-{suited_type}.gguf", lambda path: requantize(plan, path))
    return compare_files(default_source, copy)


def test_text_is_predicted_nearly_as_well(compared: Report) -> None:
    source, copy = compared.rows
    assert copy["perplexity"] < 1.02 * source["perplexity"]
    assert copy["same_top_percent"] >= 94
    assert copy["kl_divergence"] < 0.02


def test_where_q4_1_is_computed_row_by_row_batches_and_prompts_are_faster_and_the_copy_is_the_default(
    suited_type: str, compared: Report, default_model: Path, default_source: Path
) -> None:
    source, copy = compared.rows
    row_by_row = not kernel_times(["Q4_1"])["Q4_1"].is_batched and not has_gpu()
    expected = plan_type(default_source, suited_type).output if row_by_row else default_source
    assert default_model == choose_model(None) == expected
    if row_by_row:
        assert copy["decode_16"].median > 1.2 * source["decode_16"].median
        assert copy["prefill"].median > 1.4 * source["prefill"].median
