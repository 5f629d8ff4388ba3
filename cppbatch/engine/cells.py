"""How many KV cells are in use when sequences share them: the books of what `seq_cp` and `seq_rm` do in llama.cpp."""

from __future__ import annotations

from collections.abc import Iterable


class Span:
    """Cells of the positions [start, stop), held by one sequence or shared by several.

    The cells of a sequence are a chain: its last span, that one's parent, and so on to position 0. `refs` counts the
    sequences and spans that come right after it in a chain.
    """

    __slots__ = ("parent", "refs", "start", "stop")

    def __init__(self, parent: Span | None, start: int, stop: int) -> None:
        self.parent = parent
        self.start = start
        self.stop = stop
        self.refs = 1


class Cells:
    """Counts cells. Sequences are known by their last span, `tip` (None: no cells)."""

    def __init__(self) -> None:
        self.n_used = 0
        """Cells that somebody holds."""

    def grow(self, tip: Span | None, n: int) -> Span:
        """`n` cells more for the sequence; they are its own."""
        self.n_used += n
        if tip and tip.refs == 1:
            tip.stop += n
            return tip
        start = tip.stop if tip else 0
        return Span(tip, start, start + n)

    @staticmethod
    def share(tip: Span | None, n: int) -> Span | None:
        """Lets another sequence hold the first `n` of the sequence's cells too: the other's tip."""
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
        """The sequence gives up its cells; those that nobody else holds are free."""
        while tip:
            tip.refs -= 1
            if tip.refs:
                return
            self.n_used -= tip.stop - tip.start
            tip = tip.parent

    def cut(self, tip: Span | None, n: int) -> Span | None:
        """The sequence keeps its first `n` cells: its new tip."""
        kept = self.share(tip, n)
        self.free(tip)
        return kept


def n_shared(tip: Span | None) -> int:
    """How many of the sequence's cells others hold too."""
    while tip and tip.refs == 1:
        tip = tip.parent
    return tip.stop if tip else 0


def n_held(tips: Iterable[Span | None]) -> int:
    """Cells that these sequences hold together."""
    seen: set[Span] = set()
    for tip in tips:
        span = tip
        while span and span not in seen:
            _join(span)
            seen.add(span)
            span = span.parent
    return sum(span.stop - span.start for span in seen)


def _join(span: Span) -> None:
    """Makes one span of those before it that are held by nobody else any more, so that chains stay short."""
    while span.parent and span.parent.refs == 1:
        span.start = span.parent.start
        span.parent = span.parent.parent


def _split(span: Span, n: int) -> Span:
    """Cuts a span at position n in two and returns the first part, which only the second one follows yet."""
    span.parent = Span(span.parent, span.start, n)
    span.start = n
    return span.parent
