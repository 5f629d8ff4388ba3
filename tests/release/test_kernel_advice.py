"""The default model's weights: advice is given exactly where timing says that they are computed row by row."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from cppbatch.models.find import models_folder
from cppbatch.models.kernels import has_gpu, kernel_times
from cppbatch.models.pull import DEFAULT
from tests.server_process import COMMAND


@pytest.fixture
def q4_1(default_model: Path) -> Path:
    """The default model as it was downloaded."""
    return models_folder() / DEFAULT.file_name


def test_the_default_model_is_advised_where_q8_0_is_faster_in_batches_and_nowhere_else(q4_1: Path) -> None:
    done = subprocess.run(
        [*COMMAND, "models", "inspect", "--json", str(q4_1)], capture_output=True, text=True, timeout=60, check=True
    )
    found = json.loads(done.stdout)["kernels"]
    times = kernel_times(["Q4_1", "Q8_0"])
    slow, fast = times["Q4_1"], times["Q8_0"]
    pays = not slow.is_batched and fast.is_batched and fast.ms[16] < 0.9 * slow.ms[16]
    assert (found["advice"] is not None) == (pays and not has_gpu())
    if found["advice"]:
        assert "210 of 211 matrices are Q4_1" in found["advice"]
        assert f"`cppbatch models requantize {q4_1}`" in found["advice"]
