"""How a setting is declared: what commands, messages and docs need to know besides its type and default."""

from collections.abc import Iterable
from typing import NamedTuple

INT32_MAX = 2**31 - 1


class Range(NamedTuple):
    """The minimum and maximum of a number."""

    low: float
    high: float = INT32_MAX


class Setting(NamedTuple):
    """How commands, messages and docs describe a field of `EngineConfig`, in addition to its type and default."""

    group: str
    """The heading in `--help`."""
    flags: str
    """Separated by spaces. Messages use the first one; the environment variable is CPPBATCH_ plus the first long one.
    "": no flag."""
    help: str
    llama_env: str = ""
    """llama.cpp's environment variable."""
    metavar: str = ""
    range: Range | None = None
    range_words: str = ""
    """The range in messages and docs, if it differs from "from `low` to `high`"."""

    @property
    def env(self) -> str:
        """The environment variable without CPPBATCH_."""
        return env_of(self.flags.split())

    @property
    def range_text(self) -> str:
        """The range in words; "" without a range."""
        return self.range_words or (f"from {self.range.low} to {self.range.high}" if self.range else "")


def env_of(flags: Iterable[str]) -> str:
    """The environment variable of an option, without CPPBATCH_: its first long flag."""
    long = next(flag for flag in flags if flag.startswith("--"))
    return long.partition("/")[0][2:].replace("-", "_").upper()
