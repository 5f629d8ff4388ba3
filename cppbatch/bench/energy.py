"""Measures energy with the counters of GPUs (NVML) and CPUs (RAPL), or computes it from a given power."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter

import msgspec

from cppbatch.errors import ConfigError
from cppbatch.gpu_state import Gpus

_POWERCAP = Path("/sys/class/powercap")


class EnergySettings(msgspec.Struct, frozen=True, kw_only=True):
    """The user's settings for energy. Raises `ConfigError` for values that are not positive."""

    watts: float | None = None
    """The power of the machine while it computes; None: read counters."""
    power_price: float | None = None
    """Price per kWh, in any currency."""

    def __post_init__(self) -> None:
        for name, flag in (("watts", "--watts"), ("power_price", "--power-price")):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"{flag} is {value:g}; it must be more than 0")

    def tokens_per_unit(self, tokens_per_kwh: float) -> float | None:
        """Tokens per unit of money; None without a price."""
        return tokens_per_kwh / self.power_price if self.power_price else None


class EnergyMeter:
    """Sums the joules of its sources, which are monotonic."""

    def __init__(self, sources: dict[str, Callable[[], float]], missing: list[str]) -> None:
        """`missing`: the reasons why other sources cannot be read."""
        self._sources, self._missing = sources, missing

    @property
    def works(self) -> bool:
        """Whether there is a source."""
        return bool(self._sources)

    @property
    def source(self) -> str:
        """A sentence with the sources, or with the reason why there are none."""
        if not self._sources:
            return (
                f"Energy is unknown: {'; '.join(self._missing)}. Use --watts to give the power draw of the "
                "machine instead."
            )
        missing = f"; {'; '.join(self._missing)}" if self._missing else ""
        return f"Energy: {' and '.join(self._sources)}{missing}."

    def joules(self) -> float:
        """Joules since an arbitrary point in time; only use differences."""
        return sum(read() for read in self._sources.values())


def energy_meter(settings: EnergySettings, *, on_gpu: bool, powercap: Path | None = None) -> EnergyMeter:
    """The counters of this machine, or the given power. `on_gpu`: whether the model computes on a GPU."""
    if (watts := settings.watts) is not None:
        return EnergyMeter({f"{watts:g} W as given (--watts)": lambda: watts * perf_counter()}, [])
    powercap = powercap or _POWERCAP
    sources: dict[str, Callable[[], float]] = {}
    missing: list[str] = []
    if on_gpu:
        gpus = Gpus.open()
        if gpus and any(gpu.energy_joules is not None for gpu in gpus.read()):
            sources["NVML's counters of the GPUs"] = partial(_gpu_joules, gpus)
        else:
            missing.append("NVML has no energy counter here" if gpus else "the GPU cannot be read by NVML")
    counters = [zone for zone in sorted(powercap.glob("intel-rapl:*")) if _is_package(zone)]
    if not counters:
        missing.append(f"the CPU has no RAPL counters in {powercap}")
    elif not all(map(_is_readable, counters)):
        missing.append(f"the CPU's RAPL counters in {powercap} are readable only by root")
    else:
        sources["RAPL's counters of the CPU packages"] = _Rapl(counters).joules
    return EnergyMeter(sources, missing)


def tokens_per_kwh(n_tokens: float, joules: float) -> float | None:
    """Tokens per kWh; None if the counters have not changed."""
    return n_tokens / joules * 3.6e6 if joules else None  # joules per kWh


class _Rapl:
    """Adds up the increments of the counters. They wrap to 0 after some minutes, so they must be read more often."""

    def __init__(self, zones: list[Path]) -> None:
        self._zones, self._total = zones, 0.0
        self._last = [_microjoules(zone) for zone in zones]

    def joules(self) -> float:
        for i, zone in enumerate(self._zones):
            now, before = _microjoules(zone), self._last[i]
            grown = now - before if now >= before else now - before + _number(zone / "max_energy_range_uj")
            self._total += grown / 1e6
            self._last[i] = now
        return self._total


def _gpu_joules(gpus: Gpus) -> float:
    return sum(gpu.energy_joules or 0.0 for gpu in gpus.read())


def _is_package(zone: Path) -> bool:
    """Whether the zone is a CPU package. Other zones are parts of one, or the whole machine."""
    try:
        return (zone / "name").read_text().startswith("package")
    except OSError:
        return False


def _is_readable(zone: Path) -> bool:
    try:
        _microjoules(zone)
    except OSError:
        return False
    return True


def _microjoules(zone: Path) -> int:
    return _number(zone / "energy_uj")


def _number(file: Path) -> int:
    return int(file.read_text())
