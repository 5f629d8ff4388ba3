"""`cppbatch bench roofline` on a tiny model, and the speed of the device by ggml's kernels."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from cppbatch.cli.main import cli
from cppbatch.errors import ConfigError, LlamaError
from cppbatch.llama import device_speed
from cppbatch.llama.device_speed import measure_device


@pytest.fixture(autouse=True)
def small_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_speed, "_READ_BYTES", 16 << 20)
    monkeypatch.setattr(device_speed, "_PRODUCT_SHAPE", (512, 512))


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0", "Q4_K"])
def test_a_device_is_measured_with_matrices_of_the_models_type(kind: str) -> None:
    speed = measure_device("CPU", kind, n_threads=1)
    assert 1e8 < speed.bytes_per_s < 1e14
    assert 1e7 < speed.flops < 1e16


def test_a_missing_device_is_named() -> None:
    with pytest.raises(LlamaError, match=r"device 'CUDA7' not found; available: .*CPU"):
        measure_device("CUDA7", "F16", n_threads=1)


def test_each_batch_size_has_its_work_its_bound_and_its_time(tiny_llama: Path, tmp_path: Path) -> None:
    files = ["--json", str(tmp_path / "figures.json"), "--plot", str(tmp_path / "figures.png")]
    few = "-B 1,3 --prompt-tokens 8 --repeats 1 -t 1 -ngl 0".split()
    result = CliRunner().invoke(cli, ["bench", "roofline", "-m", str(tiny_llama), *few, *files])
    assert result.exit_code == 0, result.output
    figures = msgspec.json.decode((tmp_path / "figures.json").read_bytes())
    assert figures["settings"]["device"] == "CPU"
    one, three = figures["rows"]
    assert three["gflop"] == pytest.approx(3 * one["gflop"])
    assert one["mib"] < three["mib"] < 3 * one["mib"], "weights are read once"
    for row in (one, three):
        assert row["bound"] == ("compute" if row["compute_ms"] > row["memory_ms"] else "memory")
        assert row["step_ms"]["median"] > 0
    assert "GB/s" in result.output
    assert (tmp_path / "figures.png").stat().st_size > 10_000


def test_sizes_out_of_range_are_refused(tiny_llama: Path) -> None:
    result = CliRunner().invoke(cli, ["bench", "roofline", "-m", str(tiny_llama), "--repeats", "0"])
    assert isinstance(result.exception, ConfigError)
    assert "--repeats is 0" in str(result.exception)
