"""Counts KV cells shared by sequences. Mirrors the effects of `seq_cp` and `seq_rm` in llama.cpp."""

from __future__ import annotations

from collections.abc import Iterable


class Span:
    """Cells of the positions [start, stop), held by one sequence or shared by several.

    The cells of a sequence are a chain: its last span, the parent of that, and so on down to position 0. `refs` counts
    the sequences that end with this span and the spans whose parent it is. Two sequences of 15 tokens that share the
    first 10:

        [0, 10) refs 2  <-  [10, 15) refs 1   first sequence
                        <-  [10, 15) refs 1   second sequence
    """

    __slots__ = ("parent", "refs", "start", "stop")

    def __init__(self, parent: Span | None, start: int, stop: int) -> None:
        self.parent = parent
        self.start = start
        self.stop = stop
        self.refs = 1


class Cells:
    """Counts cells. A sequence is identified by its last span, `tip` (None: no cells)."""

    def __init__(self) -> None:
        self.n_used = 0
        """Cells held by at least one sequence."""

    def grow(self, tip: Span | None, n: int) -> Span:
        """Adds `n` cells held only by this sequence. Returns its new tip."""
        self.n_used += n
        if tip and tip.refs == 1:
            tip.stop += n
            return tip
        start = tip.stop if tip else 0
        return Span(tip, start, start + n)

    @staticmethod
    def share(tip: Span | None, n: int) -> Span | None:
        """Shares the first `n` cells of this sequence with another one. Returns the other's tip."""
        if tip is None or n == 0:
            return None
        span = tip
        while span.start >= n:
            assert span.parent
            span = span.parent
        if span.stop > n:
            span = _split(span, n)
        span.refs += 1
        return span

    def free(self, tip: Span | None) -> None:
        """Releases the sequence's cells. Those not held by other sequences become free."""
        while tip:
            tip.refs -= 1
            if tip.refs:
                return
            self.n_used -= tip.stop - tip.start
            tip = tip.parent

    def cut(self, tip: Span | None, n: int) -> Span | None:
        """Truncates the sequence to its first `n` cells. Returns its new tip."""
        kept = self.share(tip, n)
        self.free(tip)
        return kept


def n_shared(tip: Span | None) -> int:
    """The number of the sequence's cells shared with other sequences."""
    while tip and tip.refs == 1:
        tip = tip.parent
    return tip.stop if tip else 0


def spans_of(tip: Span | None) -> list[Span]:
    """The spans of a sequence in order of position. Joins spans that no other sequence distinguishes."""
    spans: list[Span] = []
    while tip:
        _join(tip)
        spans.append(tip)
        tip = tip.parent
    spans.reverse()
    return spans


def n_held(tips: Iterable[Span | None]) -> int:
    """The number of cells held by these sequences; shared ones count once."""
    seen: set[Span] = set()
    for tip in tips:
        span = tip
        while span and span not in seen:
            _join(span)
            seen.add(span)
            span = span.parent
    return sum(span.stop - span.start for span in seen)


def _join(span: Span) -> None:
    """Merges the span with parents that only it references, to keep chains short."""
    while span.parent and span.parent.refs == 1:
        span.start = span.parent.start
        span.parent = span.parent.parent


def _split(span: Span, n: int) -> Span:
    """Splits a span at position `n`. Returns the first part, which at first is only referenced by the second part."""
    span.parent = Span(span.parent, span.start, n)
    span.start = n
    return span.parent
