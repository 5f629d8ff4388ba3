"""How long prompts and outputs are."""

from __future__ import annotations

from typing import NamedTuple

from cppbatch.errors import ConfigError


class Lengths(NamedTuple):
    """From `low` to `high` tokens; both may occur."""

    low: int
    high: int

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low} to {self.high}"

    def check(self, flag: str) -> None:
        """Raises `ConfigError`, which names the flag, for what cannot be."""
        if not 1 <= self.low <= self.high:
            raise ConfigError(f"{flag} is {self.low}-{self.high}; it must rise, from 1 on")

    def spread(self, n: int) -> list[int]:
        """`n` lengths at equal ratios from the lowest to the highest: the same total for every seed."""
        ratio = self.high / self.low
        return [round(self.low * ratio ** (i / max(n - 1, 1))) for i in range(n)]
