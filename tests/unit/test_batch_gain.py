"""From which number of sequences on a file gains by batches, and which type of weights gains earlier."""

from __future__ import annotations

from pathlib import Path

import pytest

from cppbatch.models import batch_gain
from cppbatch.models.batch_gain import gain_notes, gains_from
from cppbatch.models.kernels import KernelTimes
from tests.support import tiny_models

TIMES = {
    "F32": KernelTimes({1: 0.04, 4: 0.16, 16: 0.6, 256: 4.0}),
    "Q8_0": KernelTimes({1: 0.013, 4: 0.05, 16: 0.1, 256: 1.6}),
    "BF16": KernelTimes({1: 0.06, 4: 0.09, 16: 0.1, 256: 1.6}),
}


@pytest.mark.parametrize(
    ("speeds", "first"),
    [
        ({1: 107, 2: 108, 3: 139, 8: 250}, 3),
        ({1: 100, 2: 130, 4: 110, 8: 200}, 8),  # a disturbed measurement is not a gain
        ({1: 100, 2: 119}, None),
        ({1: 100}, None),
    ],
)
def test_a_file_gains_from_the_first_batch_that_and_all_larger_ones_are_clearly_faster(
    speeds: dict[int, float], first: int | None
) -> None:
    assert gains_from(speeds) == first


def test_the_report_shows_from_which_batch_size_on_a_file_gains_and_which_type_gains_earlier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        batch_gain, "kernel_times", lambda kinds: {kind: TIMES[kind] for kind in kinds if kind in TIMES}
    )
    monkeypatch.setattr(batch_gain, "has_gpu", lambda: False)
    path = tiny_models.llama(tmp_path / "a.gguf")
    gains, earlier = gain_notes({1: 107.0, 2: 108.0, 3: 139.0}, str(path))
    assert gains == (
        "batching is faster here from B = 3 on (times the tokens/s of one sequence: 1.01 at B = 2, 1.30 at B = 3)."
    )
    assert earlier.startswith(
        "BF16 weights batch better: 4 rows of a matrix take 1.5 times as long as one, compared with 4.0 times for"
    )
    assert earlier.endswith(f"a single row takes 1.5 times as long (`cppbatch models requantize {path} --type BF16`).")
    assert gain_notes({2: 1.0, 4: 2.0}, str(path)) == []
    assert "no batch size reaches a gain of 1.2 here" in gain_notes({1: 10.0, 2: 10.0}, str(path))[0]
    monkeypatch.setattr(batch_gain, "has_gpu", lambda: True)
    assert len(gain_notes({1: 1.0, 2: 2.0}, str(path))) == 1
    assert len(gain_notes({1: 1.0, 2: 2.0}, str(path), n_gpu_layers=0)) == 2
