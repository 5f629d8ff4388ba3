"""Learns whether saving a state to host memory, or reading it from disk, is faster than recomputing it."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil

from cppbatch.engine.step_cost import NEW_TIME_WEIGHT

_NEGLIGIBLE_S = 0.002  # a save that hardly delays a step
_RESTORE_TIME_RATIO = 0.6  # the time to restore a state, as a fraction of that to save it
_TRY_EVERY_DECISIONS = 32  # decisions against saving; then one save updates the measurement


class SaveCost:
    """Compares saving and restoring a state with recomputing its tokens.

    Example, 1,000 tokens. A small model on a CPU: 6 ms to save, 770 ms to compute, so even prefixes with little chance
    of reuse are saved. An 8B model on an H100: 33 to 200 ms to save, because llama.cpp copies each run of cells of each
    layer separately, and 87 ms to compute. All running sequences wait for a save.
    """

    def __init__(self, token_s: Callable[[], float]) -> None:
        """`token_s`: returns the current seconds per prompt token; 0 while unknown."""
        self._token_s = token_s
        self._save_s = 0.0  # per token; 0: unknown
        self._declined = 0

    def is_worth(self, n: int, chance: float) -> bool:
        """Whether to save a state of `n` tokens that will be needed again with this probability."""
        save_s, token_s = self._save_s, self._token_s()
        if not token_s or n * save_s < _NEGLIGIBLE_S or chance * (token_s - _RESTORE_TIME_RATIO * save_s) > save_s:
            return True
        self._declined = (self._declined + 1) % _TRY_EVERY_DECISIONS
        return self._declined == 0

    def save_s(self, n: int) -> float:
        """Seconds to save a state of `n` tokens; 0 before any was saved."""
        return n * self._save_s

    def round_trip_s(self, n: int) -> float:
        """Seconds to save and restore it."""
        return (1 + _RESTORE_TIME_RATIO) * self.save_s(n)

    def tokens_for(self, share: float) -> int:
        """The number of tokens whose computation takes so long that saving one "token" takes this share of the time.

        For states of a fixed size, observed as one token each. 0: unknown.
        """
        token_s = self._token_s()
        return ceil(self._save_s / (share * token_s)) if token_s else 0

    def observe(self, n: int, seconds: float) -> None:
        """Learns from saving `n` tokens."""
        if n:
            self._save_s += (NEW_TIME_WEIGHT if self._save_s else 1.0) * (seconds / n - self._save_s)


class DiskCost:
    """Compares reading states with recomputing their tokens.

    Example, 6,000 tokens of a 135M model (138 MB): 0.1 s to read at 1 GB/s, 7 s to compute on two cores. An 8B model
    on a fast GPU: 800 MB, 0.8 s to read, 0.5 s to compute, so nothing is written.
    """

    def __init__(self, token_s: Callable[[], float]) -> None:
        """`token_s`: returns the current seconds per prompt token; 0 while unknown."""
        self._token_s = token_s
        self._read_rate = self._write_rate = 0.0  # bytes per second; 0: unknown
        self._declined = 0

    def read_s(self, n_bytes: int) -> float:
        """The time to read a file of this size."""
        # A thread, the index and restoring the state take 5 ms; few disks of servers read less than 1 GB/s.
        return 0.005 + n_bytes / (self._read_rate or self._write_rate or 1e9)

    def is_worth(self, n_tokens: int, n_bytes: int) -> bool:
        """Whether reading a file of `n_bytes` is faster than computing the `n_tokens` that it saves.

        True while the computation time is unknown: right after startup, when a file on disk helps most.
        """
        token_s = self._token_s()
        if not token_s or self.read_s(n_bytes) < n_tokens * token_s:
            return True
        self._declined = (self._declined + 1) % _TRY_EVERY_DECISIONS
        return self._declined == 0

    def observe_read(self, n_bytes: int, seconds: float) -> None:
        """Learns from a read."""
        rate = n_bytes / max(seconds, 1e-6)
        self._read_rate += (NEW_TIME_WEIGHT if self._read_rate else 1.0) * (rate - self._read_rate)

    def observe_write(self, n_bytes: int, seconds: float) -> None:
        """Learns from a write, whose time is an upper bound for a read."""
        rate = n_bytes / max(seconds, 1e-6)
        self._write_rate += (NEW_TIME_WEIGHT if self._write_rate else 1.0) * (rate - self._write_rate)
