"""Drafts without a model: the continuations of earlier occurrences of the last tokens."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from cppbatch.engine.sequence import Seq
from cppbatch.engine.speculation.match_acceptance import (
    MOST_DOUBT,
    MOST_LENGTH,
    Agreement,
    MatchAcceptance,
    Source,
    after,
)
from cppbatch.engine.speculation.ngram_index import ORDERS, Hashes, IndexedText, NgramIndex, hash_arrays
from cppbatch.engine.speculation.proposer import Draft

_INDEXED_TOKENS_PER_CALL = 8192  # tokens of prompts that one call of `propose` indexes, in about a millisecond
_RESUME_TOKENS = 8  # tokens after the end of a long match within which it may resume, and how far after its end
_LENGTHS = (MOST_LENGTH, 24, 16, 12, 8)  # matches of `ORDERS[0]` tokens and more are compared at these lengths


class _Match:
    """The source of a sequence's continuation: `text.tokens[position]` is the expected next token."""

    __slots__ = ("agreement", "length", "position", "source", "text")

    def __init__(self, text: IndexedText, position: int, length: int, agreement: int, source: int) -> None:
        self.text = text
        self.position = position
        self.length = length  # matched tokens, at most about MOST_LENGTH are counted when it is found
        self.agreement = agreement
        self.source = source


class _State:
    """The proposer's state of a running sequence."""

    __slots__ = (
        "hashes", "log_odds", "lost", "lost_at", "match", "own", "own_text", "predicted", "prediction", "shared",
    )  # fmt: skip

    def __init__(self, own: NgramIndex, own_text: IndexedText, shared: IndexedText | None) -> None:
        self.own = own
        self.own_text = own_text
        self.shared = shared  # its text in the index of all sequences
        self.hashes: Hashes | None = None  # of its last tokens; None: its prompt is not indexed yet
        self.match: _Match | None = None
        self.lost: _Match | None = (
            None  # the last long match that ended, with the position of the token that did not come
        )
        self.lost_at = 0  # the number of known tokens then
        self.log_odds = 0.0  # its own, see `MatchAcceptance`
        self.predicted: NgramIndex | None = None  # of the tokens that the request predicts
        self.prediction: IndexedText | None = None


class SuffixProposer:
    """Continues an earlier occurrence of a sequence's last tokens.

    Occurrences are searched in the sequence's own prompt and completion, in its request's prediction, and in running
    and finished sequences with the same salt. A match is followed without a search as long as its tokens come.

    If a token differs from a match's expectation, both tokens get a doubt: when `"city": "Rome"` occurs again in the
    next record of a list, the value is likely to differ again, but not the rest. A text that repeats another one
    inherits its doubts.

    `max_tokens`: tokens of finished sequences to keep, over all salts, and one text per 64 of them, because a text of a
    few tokens takes as much memory as one of 100; the least recently used ones are dropped. A request with
    `cache_prompt=False` neither uses tokens of others nor offers its own.
    """

    costs_compute = False

    def __init__(self, *, max_tokens: int = 1 << 18) -> None:
        self._max_tokens, self._max_texts = max_tokens, max_tokens // 64  # most texts are longer
        self._acceptance = MatchAcceptance()
        self._states: dict[Seq, _State] = {}
        self._shared = NgramIndex(max_tokens)
        self._groups: dict[Hashable, tuple[int, int]] = {}  # salt: the number of its group, and of its texts
        self._last_group = 0
        self._finished: dict[IndexedText, Hashable] = {}  # texts with their salts, oldest use first
        self.n_tokens = 0
        """Tokens of finished sequences that are kept."""

    # --- the interface of proposers -----------------------------------------------------------------------------

    def propose(self, sequences: Sequence[Seq], most: Sequence[int]) -> list[Draft | None]:
        """See `Proposer.propose`. The tokens of a draft are a view: they are not to be written."""
        states, left = self._states, _INDEXED_TOKENS_PER_CALL
        drafts: list[Draft | None] = []
        for sequence, limit in zip(sequences, most, strict=True):
            state = states.get(sequence)
            if state is None:
                if left <= 0:  # the next call begins with it
                    drafts.append(None)
                    continue
                state = self._start(sequence)
                left -= 256  # starting a sequence costs as much as indexing 256 tokens
            n, known = sequence.n_tokens, state.own_text.n
            if n - known > 32 or state.hashes is None:  # numpy is faster
                stop = min(n, known + max(left, 0))
                left -= stop - known
                self._read(state, stop)
                if stop == n:
                    self._begin(state, sequence)
            elif n > known:
                self._follow(state, n)
            drafts.append(self._draft(state, limit) if limit > 0 and state.match is not None else None)
        return drafts

    def finished(self, sequence: Seq) -> None:
        """See `Proposer.finished`: its tokens are kept for others while there is room."""
        state = self._states.pop(sequence, None)
        if state is None or state.shared is None:
            return
        text = state.shared
        text.trim()
        self._finished[text] = sequence.salt
        self.n_tokens += text.n
        while self.n_tokens > self._max_tokens or len(self._finished) > self._max_texts:
            oldest = next(iter(self._finished))
            salt = self._finished.pop(oldest)
            self.n_tokens -= oldest.n
            self._shared.remove(oldest)
            self._leave(salt)

    def close(self) -> None:
        """See `Proposer.close`."""
        self._states.clear()
        self._finished.clear()
        self._groups.clear()
        self._shared = NgramIndex(0)
        self.n_tokens = 0

    # --- texts --------------------------------------------------------------------------------------------------

    def _start(self, sequence: Seq) -> _State:
        # at first, the index has room for 4096 tokens of a completion
        own = NgramIndex(min(len(sequence.tokens), sequence.n_tokens + 4096))
        shared = None
        if sequence.request.cache_prompt:
            shared = self._shared.add(sequence.tokens, self._join(sequence.salt))
        state = self._states[sequence] = _State(own, own.add(sequence.tokens), shared)
        prediction = sequence.prediction
        if prediction is not None:
            state.predicted = NgramIndex(len(prediction))
            state.prediction = state.predicted.add(prediction)
            state.predicted.extend(state.prediction, len(prediction), hash_arrays(prediction, 0, len(prediction)))
        return state

    def _join(self, salt: Hashable) -> int:
        group, n = self._groups.get(salt, (0, 0))
        if not group:
            self._last_group += 1
            group = self._last_group
        self._groups[salt] = group, n + 1
        return group

    def _leave(self, salt: Hashable) -> None:
        group, n = self._groups.pop(salt)
        if n > 1:
            self._groups[salt] = group, n - 1

    def _read(self, state: _State, stop: int) -> None:
        """Indexes many tokens, up to `stop`."""
        text, shared = state.own_text, state.shared
        start = text.n
        arrays = hash_arrays(text.tokens, start, stop)
        state.own.extend(text, stop, arrays)
        if shared is not None:
            if self._is_known(shared, start, stop):
                self._shared.skip(shared, stop)
            else:
                self._shared.extend(shared, stop, arrays)

    def _is_known(self, text: IndexedText, start: int, stop: int) -> bool:
        """Whether another text of the group has the tokens from `start` to `stop`: several choices of a prompt."""
        first = start + ORDERS[0]
        if stop <= first:
            return False
        found = self._shared.find(text, first, 0, text.hashes(first))
        tokens = text.tokens[first:stop]
        return any(
            other.n - p >= len(tokens) and np.array_equal(other.tokens[p : p + len(tokens)], tokens)
            for other, p in found
        )

    # --- matches ------------------------------------------------------------------------------------------------

    def _begin(self, state: _State, sequence: Seq) -> None:
        """All of the tokens before the first draft are indexed."""
        text = state.own_text
        state.hashes = text.hashes(text.n)
        state.match = None
        if state.prediction is not None and text.n == sequence.n_prompt:
            state.match = _Match(state.prediction, 0, 0, Agreement.ONLY, Source.PREDICTION)
        else:
            self._search(state)

    def _follow(self, state: _State, n: int) -> None:
        """Processes new tokens up to `n`: compares them with the match, indexes them, and searches if it does not
        continue."""
        text, shared, match = state.own_text, state.shared, state.match
        own, all_texts, hashes = state.own, self._shared, state.hashes
        assert hashes is not None
        view = text.view
        for p in range(text.n, n):
            if match is not None and match.position < match.text.n:
                source, at = match.text, match.position
                accepted, doubt = source.view[at] == view[p], source.doubts[at]
                state.log_odds = self._acceptance.learn(
                    match.length, match.agreement, match.source, state.log_odds, accepted, doubt=doubt
                )
                if doubt or not accepted:
                    doubt = max(0, doubt - 1) if accepted else min(doubt + 1, MOST_DOUBT)
                    source.doubts[at] = text.doubts[p] = doubt
                    if shared is not None:
                        shared.doubts[p] = doubt
                if accepted:
                    match.position += 1
                    match.length += 1
                    match.agreement = after(match.agreement)
                else:
                    if match.length >= ORDERS[0] or match.source == Source.PREDICTION:
                        state.lost, state.lost_at = match, p
                    match = None
            else:
                match = None
            own.append(text, hashes)
            if shared is not None:
                all_texts.append(shared, hashes)
            hashes = text.roll(hashes, p)
        state.hashes, state.match = hashes, match
        # A match of 3 tokens was the best of the latest ones; with 8 the search is sharper.
        if match is None or match.position >= match.text.n or match.length == ORDERS[0]:
            self._search(state)

    def _search(self, state: _State) -> None:
        """Finds the match that is most likely to continue."""
        best, best_odds = None, 0.0
        for match in self._matches(state):
            odds = self._acceptance.first(match.length, match.agreement, match.source)
            if best is None or odds > best_odds:
                best, best_odds = match, odds
        if best is None and state.lost is not None:
            best = self._resume_match(state, state.lost)
        state.match = best
        if best is not None and best.text in self._finished:  # a lost match's text may have been dropped
            self._finished[best.text] = self._finished.pop(best.text)  # used last

    def _resume_match(self, state: _State, lost: _Match) -> _Match | None:
        """The long match that ended shortly before, if it continues after a change of a few tokens."""
        text, other = state.own_text, lost.text
        n = text.n
        if n - state.lost_at > _RESUME_TOKENS:
            state.lost = None
            return None
        last = text.view[n - 1]
        for p in range(lost.position, min(lost.position + _RESUME_TOKENS, other.n - 1)):
            if other.view[p] == last:
                length = 2 if p and n > 1 and other.view[p - 1] == text.view[n - 2] else 1
                return _Match(other, p + 1, length, Agreement.ONLY, lost.source)
        return None

    def _matches(self, state: _State) -> list[_Match]:
        """The best match in each source."""
        text, shared, hashes = state.own_text, state.shared, state.hashes
        assert hashes is not None
        matches = []
        for order in range(len(ORDERS)):
            if state.predicted is not None and (found := state.predicted.find(text, text.n, order, hashes)):
                matches.append(_best(text, found, order, Source.PREDICTION))
            if found := state.own.find(text, text.n, order, hashes):
                matches.append(_best(text, found, order, Source.OWN))
            if shared is not None:
                found = self._shared.find(shared, text.n, order, hashes)
                found = [(other, p) for other, p in found if other is not shared and p < other.n]
                if found:
                    match = _best(text, found, order, Source.RUNNING)
                    if match.text in self._finished:
                        match.source = Source.FINISHED
                    matches.append(match)
            if matches:
                break
        return matches

    def _draft(self, state: _State, most: int) -> Draft | None:
        match = state.match
        assert match is not None
        text, p = match.text, match.position
        n = text.n - p
        if n <= 0:
            return None
        stop = min(p + most, text.n)
        tokens, doubts = text.tokens[p:stop], text.doubts[p:stop]
        if n < most and text is state.own_text:  # the text repeats its last n tokens: so will the draft
            tokens, doubts = np.resize(tokens, most), (doubts * -(-most // n))[:most]
        probabilities = self._acceptance.probabilities(
            match.length, match.agreement, match.source, state.log_odds, doubts
        )
        return Draft(tokens, probabilities)


def _best(text: IndexedText, found: list[tuple[IndexedText, int]], order: int, source: Source) -> _Match:
    """The longest match among occurrences of the last tokens of `text`, which are given with the latest one first; of
    equally long ones one whose next token is the most frequent among them."""
    if len(found) == 1:
        other, p = found[0]
        return _Match(other, p, _length(text, other, p, order), Agreement.ONLY, source)
    lengths = [_length(text, other, p, order) for other, p in found]
    tokens = [other.view[p] for other, p in found]
    longest = max(lengths)
    among = [token for token, length in zip(tokens, lengths, strict=True) if length == longest]
    token = max(among, key=among.count)
    i = next(i for i in range(len(found)) if lengths[i] == longest and tokens[i] == token)
    n, agreeing = len(found), tokens.count(token)
    agreement = Agreement.ALL if agreeing == n else Agreement.MOST if 2 * agreeing > n else Agreement.FEW
    return _Match(*found[i], longest, agreement, source)


def _length(text: IndexedText, other: IndexedText, p: int, order: int) -> int:
    """How many of the last tokens of `text` are also those before `p` in `other`: at least `ORDERS[order]`."""
    n = text.n
    if order == 0:
        for length in _LENGTHS:
            a, b = 4 * (n - length), 4 * (p - length)
            if a >= 0 and b >= 0 and text.raw[a : 4 * n] == other.raw[b : 4 * p]:
                return length
    length = ORDERS[order]
    a, b, one, two = n - length - 1, p - length - 1, text.view, other.view
    while length < ORDERS[0] and a >= 0 and b >= 0 and one[a] == two[b]:
        a, b, length = a - 1, b - 1, length + 1
    return length
