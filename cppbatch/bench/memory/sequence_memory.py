"""What one sequence takes, short and long, and a checkpoint of it: from llama.cpp's log of creating a context."""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

_MIB = 2**20
_CACHE = re.compile(r"size =\s*([\d.]+) MiB \(\s*(\d+) cells,\s*(\d+) layers,\s*\d+/(\d+) seqs\)")
_STATES = re.compile(r"size =\s*([\d.]+) MiB \(\s*(\d+) cells,.* seqs\s+(\d+) rs_seq\)")
_OTHER_STATES = re.compile(r"DSV4 \S+ state buffer size =\s*([\d.]+) MiB")


class SequenceMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of a sequence in bytes: cells of full attention, cells of a sliding window, recurrent states."""

    token_bytes: float = 0.0
    """Of each token."""
    window: int = 0
    """Tokens of the sliding window; 0: there is none."""
    window_token_bytes: float = 0.0
    """Of each of the last `window` tokens, in addition."""
    state_bytes: int = 0
    """Of any number of tokens."""

    def bytes_of(self, n: int) -> int:
        """A sequence of `n` tokens."""
        return round(n * self.token_bytes) + self.checkpoint_bytes(n)

    def checkpoint_bytes(self, n: int) -> int:
        """A checkpoint of it: what cannot be truncated."""
        return round(min(n, self.window) * self.window_token_bytes) + self.state_bytes


def read_sequence_memory(lines: Iterable[str], *, window: int, n_sequences: int) -> SequenceMemory:
    """From the log of creating a context for `n_sequences` of a model with this sliding window."""
    in_window, token_bytes, window_token_bytes, state_bytes = False, 0.0, 0.0, 0.0
    for line in lines:
        if "creating" in line and "KV cache" in line:
            in_window = bool(re.search(r"creating\s+SWA", line))
        elif found := _STATES.search(line):
            state_bytes += float(found[1]) * _MIB / int(found[2]) / (1 + int(found[3]))
        elif found := _OTHER_STATES.search(line):
            state_bytes += float(found[1]) * _MIB / n_sequences
        elif found := _CACHE.search(line):
            each = float(found[1]) * _MIB / (int(found[2]) * int(found[4]))
            if in_window:
                window_token_bytes += each
            else:
                token_bytes += each
    return SequenceMemory(
        token_bytes=token_bytes,
        window=window if window_token_bytes else 0,
        window_token_bytes=window_token_bytes,
        state_bytes=round(state_bytes),
    )
