"""The acceptance probability of a match's continuation, learned during generation."""

from __future__ import annotations

from enum import IntEnum
from math import exp

import numpy as np
import numpy.typing as npt

_LEVELS = (0, 1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32)
"""Thresholds of matched tokens for the length classes of matches."""
_FIRST_LENGTHS = (0.4, -0.2, 0.1, -0.4, 0.0, 0.3, 0.7, 1.1, 1.5, 2.0, 2.5, 3.0)  # log-odds before anything is learned
MOST_LENGTH = _LEVELS[-1]
"""Longer matches are not more likely to continue."""
_LEVEL = [max(i for i, least in enumerate(_LEVELS) if least <= length) for length in range(MOST_LENGTH + 1)]

_RATE = 0.03  # learning rate over all matches
_SEQUENCE_RATE = 0.5  # learning rate of a sequence: about 10 tokens change its estimates
_SEQUENCE_DECAY = 0.97
_MOST_LOG_ODDS = 4.0
_UPDATE_EVERY_TOKENS = 32  # learned tokens between updates of the estimates


class Source(IntEnum):
    """The source of a match."""

    OWN = 0
    """The sequence's own prompt or completion."""
    PREDICTION = 1
    """The request's prediction (`Seq.prediction`)."""
    RUNNING = 2
    """Another running sequence."""
    FINISHED = 3
    """A finished sequence."""


class Agreement(IntEnum):
    """The evidence for the next token of a match: first, what follows other occurrences of the same tokens; once tokens
    have been accepted, their number: `ACCEPTED` is 1, each number above it one more."""

    ONLY = 0
    """Only one occurrence."""
    ALL = 1
    """All are followed by the same token."""
    MOST = 2
    """More than half are followed by this token."""
    FEW = 3
    ACCEPTED = 4


_FIRST_AGREEMENTS = (0.0, 0.4, -0.5, -1.2, 0.2, 0.3, 0.4, 0.4, 0.5, 0.5, 0.6, 0.6)
_FIRST_SOURCES = (0.0, 0.5, -0.1, -0.1)
_FIRST_DOUBTS = (0.0, -1.0, -2.0, -3.0)
MOST_DOUBT = len(_FIRST_DOUBTS) - 1


def after(agreement: int) -> int:
    """The agreement of a match after its next token was accepted."""
    return Agreement.ACCEPTED if agreement < Agreement.ACCEPTED else min(agreement + 1, len(_FIRST_AGREEMENTS) - 1)


class MatchAcceptance:
    """Online logistic regression: the log-odds that a match's next token comes are the sum of weights for the match's
    length, agreement and source, the token's doubt, and the sequence's own log-odds. Doubt, 0 to `MOST_DOUBT`: how
    often earlier matches continued with another token there."""

    def __init__(self) -> None:
        self._lengths = list(_FIRST_LENGTHS)
        self._agreements = list(_FIRST_AGREEMENTS)
        self._sources = list(_FIRST_SOURCES)
        self._doubts = np.array(_FIRST_DOUBTS)
        self._until_fresh = _UPDATE_EVERY_TOKENS
        self._log_odds: dict[tuple[int, int, int, int], npt.NDArray[np.float64]] = {}

    def learn(self, length: int, agreement: int, source: int, own: float, accepted: bool, *, doubt: int = 0) -> float:
        """Learns whether the token after a match of `length` tokens was the expected one. `doubt`: of the expected one.

        `own`: the sequence's own log-odds, 0 at first. Returns the new ones.
        """
        level = _LEVEL[length] if length < MOST_LENGTH else -1
        base = self._lengths[level] + self._agreements[agreement] + self._sources[source]
        if doubt:
            base += float(self._doubts[doubt])
        step = _RATE * (accepted - 1 / (1 + exp(-base)))
        if doubt:
            self._doubts[doubt] += step
        self._lengths[level] += step
        self._agreements[agreement] += step
        self._sources[source] += step
        self._until_fresh -= 1
        if not self._until_fresh:
            self._until_fresh = _UPDATE_EVERY_TOKENS
            self._log_odds.clear()
        own = own * _SEQUENCE_DECAY + _SEQUENCE_RATE * (accepted - 1 / (1 + exp(-base - own)))
        return min(max(own, -_MOST_LOG_ODDS), _MOST_LOG_ODDS)

    def first(self, length: int, agreement: int, source: int) -> float:
        """The log-odds that the next token is accepted, without the sequence's own log-odds."""
        level = _LEVEL[min(length, MOST_LENGTH)]
        return self._lengths[level] + self._agreements[agreement] + self._sources[source]

    def probabilities(
        self, length: int, agreement: int, source: int, own: float, doubts: bytearray
    ) -> npt.NDArray[np.float64]:
        """For each token of a draft, the probability that it is accepted if the preceding ones are; rises with each
        accepted one. `doubts`: of these tokens."""
        key = (length if length < MOST_LENGTH else MOST_LENGTH, agreement, source, len(doubts))
        log_odds = self._log_odds.get(key)
        if log_odds is None:
            log_odds = self._log_odds[key] = self._of_tokens(*key)
        log_odds = log_odds + own
        if any(doubts):
            log_odds += self._doubts[np.frombuffer(doubts, np.uint8)]
        return 1 / (1 + np.exp(-log_odds))

    def _of_tokens(self, length: int, agreement: int, source: int, n: int) -> npt.NDArray[np.float64]:
        log_odds = np.empty(n)
        for i in range(n):
            log_odds[i] = self.first(length, agreement, source)
            length += 1
            agreement = after(agreement)
        return log_odds
