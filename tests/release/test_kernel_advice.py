"""The default model's weights: advice is given exactly where other types are clearly faster by timing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from cppbatch.cli.main import cli
from cppbatch.models.find import models_folder
from cppbatch.models.kernels import has_gpu, kernel_times
from cppbatch.models.pull import DEFAULT
from cppbatch.models.requantize import EXACT, target_type


@pytest.fixture
def q4_1(default_model: Path) -> Path:
    """The default model as it was downloaded."""
    return models_folder() / DEFAULT.file_name


def kernels_of(path: Path) -> dict[str, Any]:
    done = CliRunner().invoke(cli, ["models", "inspect", "--json", str(path)])
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)["kernels"]
    return found


def test_the_default_model_as_downloaded_is_advised_exactly_where_other_types_are_faster(q4_1: Path) -> None:
    found = kernels_of(q4_1)
    times = kernel_times(["Q4_1", "Q8_0", *EXACT])
    changes = {kind: target_type(kind, times, is_small=True) != kind for kind in ("Q4_1", "Q8_0")}
    assert (found["advice"] is not None) == (changes["Q4_1"] and not has_gpu())
    if found["advice"]:  # its embedding, which is also its output matrix, is Q8_0
        which = "all 211 matrices are Q4_1 and Q8_0" if changes["Q8_0"] else "210 of 211 matrices are Q4_1"
        assert which in found["advice"]
        remedies = (f"`cppbatch models requantize {q4_1}`", f"its copy (-m {q4_1.with_suffix('')}-")
        assert any(remedy in found["advice"] for remedy in remedies)


def test_the_file_that_pull_has_chosen_cannot_be_improved(default_model: Path) -> None:
    assert kernels_of(default_model)["advice"] is None
