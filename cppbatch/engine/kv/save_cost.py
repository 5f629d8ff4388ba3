"""Whether saving a state to host memory, or reading it from disk, is faster than computing it: learned from both."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil

_NEGLIGIBLE_S = 0.002  # a save that a step hardly notices
_RESTORE = 0.6  # the time to restore a state, as a part of that to save it
_NEW = 0.3  # weight of a new measurement
_TRY_EVERY = 32  # decisions against saving; then one save measures what it takes now


class SaveCost:
    """Compares saving and restoring a state with computing its tokens again.

    Example, 1,000 tokens. A small model on a CPU: 6 ms to save, 770 ms to compute, so even prefixes that perhaps nobody
    takes are saved. An 8B model on an H100: 33 to 200 ms to save, because llama.cpp copies each run of cells of each
    layer by itself, and 87 ms to compute. All running sequences wait for a save.
    """

    def __init__(self, token_s: Callable[[], float]) -> None:
        """`token_s`: seconds to compute a prompt token now; 0 while that is not known."""
        self._token_s = token_s
        self._save_s = 0.0  # of a token; 0: not known
        self._declined = 0

    def is_worth(self, n: int, chance: float) -> bool:
        """Whether to save a state of `n` tokens that is needed again with this probability."""
        save_s, token_s = self._save_s, self._token_s()
        if not token_s or n * save_s < _NEGLIGIBLE_S or chance * (token_s - _RESTORE * save_s) > save_s:
            return True
        self._declined = (self._declined + 1) % _TRY_EVERY
        return self._declined == 0

    def round_trip_s(self, n: int) -> float:
        """Seconds to save a state of `n` tokens and to restore it; 0 before any was saved."""
        return (1 + _RESTORE) * n * self._save_s

    def tokens_for(self, share: float) -> int:
        """The number of tokens that take so long to compute that a save of one "token" is this share of the time.

        For states whose size does not depend on their tokens, observed as one token each. 0: not known.
        """
        token_s = self._token_s()
        return ceil(self._save_s / (share * token_s)) if token_s else 0

    def observe(self, n: int, seconds: float) -> None:
        """Learns from a save of `n` tokens."""
        if n:
            self._save_s += (_NEW if self._save_s else 1.0) * (seconds / n - self._save_s)


# --- on disk ---------------------------------------------------------------------------------------------------------
# Whether reading a prefix back from this disk is faster than computing it, learned from reads and writes.


_FIRST_GUESS = 1e9  # bytes a second, before anything was read or written: few disks of servers are slower
_LATENCY_S = 0.005  # of a read besides its bytes: a thread, the index, restoring the state


class DiskCost:
    """Compares reading states with computing their tokens.

    Example, 6,000 tokens of a 135M model (138 MB): 0.1 s to read at 1 GB/s, 7 s to compute on two cores. An 8B model
    on a fast GPU: 800 MB, 0.8 s to read, 0.5 s to compute, so nothing is written.
    """

    def __init__(self, token_s: Callable[[], float]) -> None:
        """`token_s`: seconds to compute a prompt token now; 0 while that is not known."""
        self._token_s = token_s
        self._read_rate = self._write_rate = 0.0  # bytes a second; 0: not known
        self._declined = 0

    def read_s(self, n_bytes: int) -> float:
        """The time to read a file of so many bytes."""
        return _LATENCY_S + n_bytes / (self._read_rate or self._write_rate or _FIRST_GUESS)

    def is_worth(self, n_tokens: int, n_bytes: int) -> bool:
        """Whether a file of `n_bytes`, of which `n_tokens` would not have to be computed, is faster than computing.

        True while nobody knows how long computing takes: right after a start, when a file on disk helps most.
        """
        token_s = self._token_s()
        if not token_s or self.read_s(n_bytes) < n_tokens * token_s:
            return True
        self._declined = (self._declined + 1) % _TRY_EVERY
        return self._declined == 0

    def observe_read(self, n_bytes: int, seconds: float) -> None:
        """Learns from a read."""
        rate = n_bytes / max(seconds, 1e-6)
        self._read_rate += (_NEW if self._read_rate else 1.0) * (rate - self._read_rate)

    def observe_write(self, n_bytes: int, seconds: float) -> None:
        """Learns from a write, which says what a read takes at most."""
        rate = n_bytes / max(seconds, 1e-6)
        self._write_rate += (_NEW if self._write_rate else 1.0) * (rate - self._write_rate)
