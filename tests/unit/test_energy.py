"""Tokens per kWh and per unit of money: what is counted, and the message if nothing can be."""

from __future__ import annotations

from pathlib import Path
from time import sleep

import pytest

from cppbatch.bench.energy import EnergySettings, energy_meter, tokens_per_kwh
from cppbatch.errors import ConfigError
from tests.support.fake_nvml import FakeNvml, install


@pytest.fixture
def powercap(tmp_path: Path) -> Path:
    """Two CPU packages, a part of one, and the whole machine, as Linux shows RAPL's counters."""
    for zone, name, microjoules in (
        ("intel-rapl:0", "package-0", 5_000_000),
        ("intel-rapl:0:0", "core", 1_000_000),
        ("intel-rapl:1", "package-1", 7_000_000),
        ("intel-rapl:2", "psys", 90_000_000),
    ):
        folder = tmp_path / zone
        folder.mkdir()
        (folder / "name").write_text(f"{name}\n")
        (folder / "energy_uj").write_text(f"{microjoules}\n")
        (folder / "max_energy_range_uj").write_text("10000000\n")
    return tmp_path


def grow(powercap: Path, zone: str, microjoules: int) -> None:
    (powercap / zone / "energy_uj").write_text(f"{microjoules}\n")


def test_the_counters_of_all_cpu_packages_are_added_up_and_may_wrap_to_0(powercap: Path) -> None:
    meter = energy_meter(EnergySettings(), on_gpu=False, powercap=powercap)
    before = meter.joules()
    grow(powercap, "intel-rapl:0", 8_000_000)  # + 3 J
    grow(powercap, "intel-rapl:0:0", 2_000_000)  # a part of a package
    grow(powercap, "intel-rapl:1", 1_000_000)  # + 4 J, over its end at 10 J
    grow(powercap, "intel-rapl:2", 99_000_000)  # the machine, which contains the packages
    assert meter.joules() - before == pytest.approx(7)
    assert meter.source == "Energy: RAPL's counters of the CPU packages."


def test_a_gpu_that_computes_is_counted_with_the_cpu(powercap: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml()
    install(monkeypatch, nvml)
    meter = energy_meter(EnergySettings(), on_gpu=True, powercap=powercap)
    before = meter.joules()
    nvml.joules += 30
    grow(powercap, "intel-rapl:0", 6_000_000)
    assert meter.joules() - before == pytest.approx(31)
    assert meter.source == "Energy: NVML's counters of the GPUs and RAPL's counters of the CPU packages."


def test_a_source_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeNvml())
    meter = energy_meter(EnergySettings(), on_gpu=True, powercap=tmp_path)
    assert meter.works
    assert meter.source == f"Energy: NVML's counters of the GPUs; the CPU has no RAPL counters in {tmp_path}."


def test_without_any_source_the_error_names_the_flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, None)
    meter = energy_meter(EnergySettings(), on_gpu=True, powercap=tmp_path)
    assert not meter.works
    assert meter.source == (
        f"Energy is unknown: the GPU cannot be read by NVML; the CPU has no RAPL counters in {tmp_path}. "
        "Use --watts to give the power draw of the machine instead."
    )


def test_counters_that_only_root_may_read_are_not_used(powercap: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path) -> int:
        raise PermissionError(path)

    monkeypatch.setattr("cppbatch.bench.energy._number", refused)
    meter = energy_meter(EnergySettings(), on_gpu=False, powercap=powercap)
    assert not meter.works
    assert "readable only by root" in meter.source


def test_a_given_power_replaces_counters(powercap: Path) -> None:
    meter = energy_meter(EnergySettings(watts=100), on_gpu=True, powercap=powercap)
    before = meter.joules()
    sleep(0.05)
    assert 5 <= meter.joules() - before < 50
    assert meter.source == "Energy: 100 W as given (--watts)."


def test_tokens_for_a_kwh_and_for_money() -> None:
    assert tokens_per_kwh(100, 3.6e6) == 100
    assert tokens_per_kwh(100, 0) is None
    assert EnergySettings(power_price=0.25).tokens_per_unit(100) == 400
    assert EnergySettings().tokens_per_unit(100) is None


@pytest.mark.parametrize(("field", "flag"), [("watts", "--watts is 0"), ("power_price", "--power-price is 0")])
def test_zero_is_refused(field: str, flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        EnergySettings(**{field: 0.0})
