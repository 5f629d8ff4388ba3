"""A language model made of a hash: deterministic, instant, and strict about what llama.cpp would not forgive."""

from __future__ import annotations

import codecs
import itertools
import zlib
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from llguidance import LLTokenizer, TokenizerWrapper

from cppbatch import BatchInferenceEngine, Completion, FinishReason, GenerationEvent, SamplingParams
from cppbatch.config import KvLayout, Sharing
from cppbatch.engine.core import EngineCore
from cppbatch.engine.kv.prefix_cache import REUSE_COSTS, ReuseCosts
from cppbatch.engine.lora_sets import AdapterSet
from cppbatch.engine.media.input import MediaInput
from cppbatch.engine.model_info import AdapterInfo, ModelInfo
from cppbatch.engine.runtime import Layouts, Runtime
from cppbatch.engine.sequence import Seq
from cppbatch.engine.speculation.proposer import Draft, Proposer
from cppbatch.engine.speculation.row_proposer import RowProposer
from cppbatch.errors import CacheFull, LlamaError
from cppbatch.llama import BackendSampling, Batch, EmbeddingBatch

EOG = frozenset({60, 61, 62, 63})
PIECES: list[bytes] = [
    *(letter.encode() for letter in "abcdefghijklmnop" + "aabbc  "),
    *(word.encode() for word in ("ab", "ba", "aab", "é", "日", "🙂", "cé")),
    *[b"\xc3"] * 9,  # é is these two
    *[b"\xa9"] * 9,
    *[b"\xf0\x9f"] * 6,  # 🙂 is these two
    *[b"\x99\x82"] * 6,
    *[b""] * len(EOG),
]
N_VOCAB = len(PIECES)
N_MOODS = 1009
LOGITS = np.random.default_rng(7).permuted(np.tile(np.arange(N_VOCAB, dtype=np.float32), (N_MOODS, 1)), axis=1)
"""float32[N_MOODS, N_VOCAB]: every row ranks the whole vocabulary, its best token one above the next."""
LIKELIEST_FIRST: list[list[int]] = np.argsort(-LOGITS, axis=1).tolist()


def mood(tokens: bytes | bytearray, adapters: AdapterSet = ()) -> int:
    """The row of LOGITS that follows these tokens: any other token, order, length or adapter gives another row."""
    return zlib.crc32(tokens, hash(adapters) % 2**32 if adapters else 0) % N_MOODS


class FakeVocab:
    """One token per byte that is not whitespace; pieces that are letters, words, and parts of UTF-8 characters."""

    n_tokens = N_VOCAB
    eog = EOG
    suppressed: frozenset[int] = frozenset()
    markers = np.isin(np.arange(N_VOCAB), (2, 8))
    adds_bos = False
    longest_piece = max(map(len, PIECES))
    control_texts: tuple[str, ...] = ()

    def tokenize(
        self,
        text: str,
        *,
        add_special: bool = True,
        add_eos: bool = True,
        parse_special: bool = True,
        plain: Sequence[tuple[int, int]] = (),
        cancelled: Callable[[], bool] = lambda: False,
    ) -> npt.NDArray[np.int32]:
        letters = np.frombuffer("".join(text.split()).encode(), np.uint8)
        return (letters % min(EOG)).astype(np.int32)

    def tokenize_pair(self, query: str, document: str) -> npt.NDArray[np.int32]:
        return np.concatenate([self.tokenize(query), self.tokenize(document)])

    def piece(self, token: int, *, special: bool = False) -> bytes:
        return b"<end>" if special and token in EOG else PIECES[token]

    def for_grammars(self) -> LLTokenizer:
        return LLTokenizer(TokenizerWrapper(_GrammarVocab()))

    def dry_sampler(self, **settings: Any) -> object:
        raise NotImplementedError("DRY needs a real vocabulary")


class _GrammarVocab:
    """The pieces as llguidance wants them; a text is tokenised by the longest piece that fits, if any does."""

    eos_token_id = min(EOG)
    bos_token_id = None
    tokens = tuple(piece or f"<{i}>".encode() for i, piece in enumerate(PIECES))
    special_token_ids = tuple(EOG)

    def __call__(self, text: bytes | str) -> list[int]:
        rest, tokens = text.encode() if isinstance(text, str) else text, []
        while rest:
            best = max(
                (t for t in range(N_VOCAB) if PIECES[t] and rest.startswith(PIECES[t])), key=lambda t: len(PIECES[t])
            )
            tokens.append(best)
            rest = rest[len(PIECES[best]) :]
        return tokens


Place = tuple[int, int, int]
"""The position of a cell in time, row and column: all three are equal, except in images."""


@dataclass(frozen=True)
class FakeState:
    """A sequence in host memory; a byte a token, but counted as 1 MiB, the unit of --swap-space."""

    tokens: bytes
    n_bytes: int = 1 << 20
    adapters: tuple[AdapterSet, ...] = ()
    places: tuple[Place, ...] = ()

    @property
    def data(self) -> npt.NDArray[np.uint8]:
        return np.frombuffer(self.tokens, np.uint8)

    @property
    def form(self) -> dict[str, Any]:
        return {"adapters": self.adapters, "places": self.places}


NEVER = 1 << 31  # `first_cut` of states


class FakeContext:
    """Cells that hold the tokens themselves. Every decode asserts the engine's invariants.

    `cells[seq_id]`: the tokens held, in order; `places[seq_id]`: their positions; `owned[seq_id]`: the numbers of those
    cells, which sequences may share; `made_with[seq_id]`: the LoRA adapters that each was computed with, which must be
    those at work. Sequences are cut by positions in time, so never within an image with rows and columns. `sharing`:
    what of it works, as in a real context; the rest fails the test. `steps`: for each decode, the number of tokens of
    every seq_id; `sets`: the adapters at work. `fail_at[n] = error` lets the n-th decode (from 1) raise it: `CacheFull`
    changes nothing, others leave cells half-written, as in llama.cpp. `min_rows`: tokens, and rows of logits if it
    has any, that a ubatch computes at least. `keeps`: with "checkpoints", how many of its last tokens a sequence can
    lose without one, as a sliding window.
    """

    def __init__(
        self,
        *,
        n_ctx: int,
        n_batch: int,
        n_seq_max: int,
        kv_unified: bool,
        sharing: Sharing,
        n_more_ids: int = 0,
        n_ubatch: int = 0,
        min_rows: int = 1,
        keeps: int = 0,
    ) -> None:
        self.keeps = keeps
        self.n_batch, self.n_ubatch = n_batch, n_ubatch or n_batch
        self.min_rows = min_rows
        self.n_seq_max = n_seq_max
        self.sets: list[AdapterSet] = []  # of each decode
        self._numbers = itertools.count()
        self.steps: list[dict[int, int]] = []
        self.copying: set[int] = set()
        """seq_ids from or to which streams are copied in the next decode."""
        self.last_rows: tuple[list[int], list[int]] = [], []
        """The last decode's seq_ids, and whether each token wants logits."""
        self.vector_steps: list[dict[int, int]] = []  # of decodes of images
        self.reopen(n_ctx=n_ctx, kv_unified=kv_unified, sharing=sharing, n_more_ids=n_more_ids)
        self.fail_at: dict[int, LlamaError] = {}
        self.fail_restore = False
        self.backend_sampling: BackendSampling | None = None
        self.shifted: set[int] = set()  # shifted after the last decode: their states cannot be saved
        self.n_shifted = 0
        self.is_closed = False
        self._moods: list[int] = []
        self.gives_hidden_rows = False
        self._hidden: list[tuple[int, int]] = []  # the CRC and length of the text up to each token of the last decode

    def reopen(self, *, n_ctx: int, kv_unified: bool, sharing: Sharing, n_more_ids: int) -> None:
        self.states: list[bytes] = [b""] * (self.n_seq_max + n_more_ids)  # the tokens that each state has seen
        self.n_ctx = n_ctx
        self.n_ctx_seq = n_ctx if kv_unified else n_ctx // self.n_seq_max
        self.n_seq_ids = n_seq_ids = self.n_seq_max + n_more_ids
        self.kv_unified = kv_unified
        self.has_streams = not kv_unified
        self.attention_tile = 1
        self.shares_cells = kv_unified
        self.n_window, self.has_states = 0, sharing in ("checkpoints", "whole")
        self.sharing = sharing
        self.cells = [bytearray() for _ in range(n_seq_ids)]
        self.places: list[list[Place]] = [[] for _ in range(n_seq_ids)]
        self.owned: list[list[int]] = [[] for _ in range(n_seq_ids)]
        self.made_with: list[list[AdapterSet]] = [[] for _ in range(n_seq_ids)]
        self.adapters: AdapterSet = ()
        self.gaps: dict[int, tuple[int, int]] = {}  # positions that were removed from the middle of a sequence

    @property
    def can_shift(self) -> bool:
        return self.sharing not in ("whole", "checkpoints")

    @property
    def n_used(self) -> int:
        return len(set().union(*self.owned))

    def use_adapters(self, adapters: AdapterSet) -> None:
        self.adapters = adapters

    def use_threads(self, n: int) -> None:
        raise AssertionError("a fake computes without threads")

    def decode(self, batch: Batch) -> None:
        n = batch.n_tokens
        assert not self.gaps, f"gaps in the positions of {self.gaps}"
        assert not self.is_closed, "decode on a closed context"
        assert 1 <= n <= self.n_batch, f"a batch of {n} tokens; the limit is {self.n_batch}"
        seq_ids = batch.seq_ids[:n].tolist()
        assert 0 <= min(seq_ids) <= max(seq_ids) < self.n_seq_max, f"seq_ids out of range: {seq_ids}"
        runs = [(seq_id, len(list(run))) for seq_id, run in itertools.groupby(seq_ids)]
        later = {seq_id for i, (seq_id, _) in enumerate(runs) if seq_id in dict(runs[:i])}
        assert len(runs) == len(set(seq_ids)) + len(later), f"a sequence in more than two parts: {seq_ids}"
        assert all(dict(reversed(runs))[seq_id] == 1 for seq_id in later), f"the first part has more tokens: {seq_ids}"
        self.steps.append(dict(Counter(seq_ids)))
        self.sets.append(self.adapters)
        error = self.fail_at.get(len(self.steps))
        if isinstance(error, CacheFull):
            raise error
        self._write(batch, seq_ids)
        self.shifted.clear()
        self.copying.clear()
        if error:
            for seq_id in set(seq_ids):
                for held in self._held(seq_id):
                    del held[-1]
                self.states[seq_id] = bytes(self.cells[seq_id])
            raise error

    def _write(self, batch: Batch, seq_ids: list[int]) -> None:
        n = batch.n_tokens
        self._moods, self._hidden = [], []
        wants_logits = batch.wants_logits[:n].tolist()
        asked = [seq_id for seq_id, wants in zip(seq_ids, wants_logits, strict=True) if wants]
        assert len(asked) == batch.n_outputs, f"logits asked for by seq_ids {asked}"
        for seq_id in set(seq_ids):
            flags = [wants_logits[place] for place in range(n) if seq_ids[place] == seq_id]
            assert flags == sorted(flags), f"seq_id {seq_id} wants logits of tokens that are not its last ones"
        self.last_rows = seq_ids, wants_logits
        if self.min_rows > 1:
            for ubatch in ubatches(seq_ids, self.n_ubatch):
                n_rows = sum(wants_logits[place] for place in ubatch)
                is_large = len(ubatch) >= self.min_rows and (n_rows >= self.min_rows or n_rows == 0)
                assert is_large, f"a ubatch of {len(ubatch)} tokens and {n_rows} rows of logits"
        for i, (token, position, seq_id) in enumerate(
            zip(batch.tokens[:n].tolist(), batch.positions[:n].tolist(), seq_ids, strict=True)
        ):
            cells = self.cells[seq_id]
            assert 0 <= token < N_VOCAB, f"token {token}"
            free = self._free_position(seq_id)
            assert position == free, f"seq_id {seq_id} has position {free} free and gets {position}"
            made_with = self.made_with[seq_id]
            assert made_with[-1:] in ([], [self.adapters]), f"{seq_id} is of {made_with[-1]}, not {self.adapters}"
            self._append(seq_id, token, (position, position, position))
            if self.gives_hidden_rows:
                self._hidden.append((zlib.crc32(cells), len(cells)))
            if batch.wants_logits[i]:
                self._moods.append(mood(cells, self.adapters))
        assert self.n_used <= self.n_ctx, f"{self.n_used} cells used of {self.n_ctx}"
        assert max(map(len, self.cells)) <= self.n_ctx_seq, f"a sequence is longer than {self.n_ctx_seq}"

    def computes_rows_in_order(self) -> bool:
        """Whether the last decode computes its rows of logits in batch order, where sequences have streams."""
        seq_ids, wants_logits = self.last_rows
        rows = [place for ubatch in ubatches(seq_ids, self.n_ubatch) for place in ubatch if wants_logits[place]]
        return rows == sorted(rows)

    def decode_vectors(self, batch: EmbeddingBatch, *, causal: bool) -> None:
        """The first number of a vector is the byte that its cell holds, which is not a token. With multi-dimensional
        positions, the second is its place in the image, the third the number of columns."""
        n = batch.n_tokens
        seq_ids = batch.seq_ids[:n].tolist()
        assert 1 <= n <= self.n_batch, f"a batch of {n} vectors; the limit is {self.n_batch}"
        if not causal:  # these attend to each other: the second number is the place in the image, the third its length
            assert n <= self.n_ubatch, f"{n} vectors in ubatches of {self.n_ubatch}"
            assert batch.vectors[:n, 1:].tolist() == [[i, n] for i in range(n)], "not one whole image"
        self.vector_steps.append(dict(Counter(seq_ids)))
        for vector, given, seq_id in zip(batch.vectors[:n], batch.positions_by_dimension.T, seq_ids, strict=True):
            free = self._free_position(seq_id)
            place = free, free, free
            if batch.n_dimensions > 1:
                at, n_columns = map(int, vector[1:])
                start = self.places[seq_id][-1][0] if at else free
                assert at == len(self.places[seq_id]) - self._index(seq_id, start), f"{vector} is not the next one"
                place = start, start + at // n_columns, start + at % n_columns
            expected = place[:1] if batch.n_dimensions == 1 else (*place, 0)
            assert (*given.tolist(),) == expected, f"seq_id {seq_id} gets {given} in place of {expected}"
            assert N_VOCAB <= vector[0] < 256, f"{vector} is not a vector of the fake encoder"
            self._append(seq_id, int(vector[0]), place)
        assert self.n_used <= self.n_ctx, f"{self.n_used} cells used of {self.n_ctx}"
        assert max(map(len, self.cells)) <= self.n_ctx_seq, f"a sequence is longer than {self.n_ctx_seq}"

    def logits(self, n_outputs: int) -> npt.NDArray[np.float32]:
        assert n_outputs == len(self._moods), f"{n_outputs} rows read, {len(self._moods)} asked for"
        return LOGITS[self._moods]

    def hidden_rows(self, n: int) -> npt.NDArray[np.float32]:
        """What `tests.support.fake_heads.FakeHeadContext` reads."""
        assert n == len(self._hidden), f"{n} hidden rows read of {len(self._hidden)}"
        return np.array([(crc >> 16, crc & 0xFFFF, length, 0) for crc, length in self._hidden], np.float32)

    def embedding(self, seq_id: int) -> npt.NDArray[np.float32]:
        raise AssertionError("a context for text has no embeddings")

    def token_embeddings(self, n_outputs: int) -> npt.NDArray[np.float32]:
        raise AssertionError("this context has no vectors of tokens")

    def remove(self, seq_id: int, start: int = 0, stop: int = -1) -> bool:
        assert 0 <= seq_id < self.n_seq_ids, f"seq_id {seq_id}"
        if self.sharing in ("whole", "checkpoints") and start > 0:
            if start <= self.last_position(seq_id):
                return False
        elif stop < 0:
            self.states[seq_id] = b""
        if 0 <= stop <= self.last_position(seq_id):
            self.gaps[seq_id] = (start, stop)
        first, last = self._index(seq_id, start), None if stop < 0 else self._index(seq_id, stop)
        for held in self._held(seq_id):
            del held[first:last]
        return True

    def shift(self, seq_id: int, start: int, by: int) -> None:
        """The cells from `start` on have positions that start after a gap, which `remove` has left."""
        assert self.can_shift, "a memory that is not all cells"
        assert self.gaps.pop(seq_id) == (start + by, start), f"no gap before {start}"
        held = self.owned[seq_id]
        moved = set(held[start + by :])
        for other in (owned for i, owned in enumerate(self.owned) if i != seq_id):
            assert moved.isdisjoint(other), f"cells of seq_id {seq_id} that are shifted are shared"
        places = self.places[seq_id]
        places[start + by :] = [(t + by, y + by, x + by) for t, y, x in places[start + by :]]
        self.shifted.add(seq_id)
        self.n_shifted += 1

    def remove_padding(self, seq_id: int, position: int) -> None:
        assert position == 0 or position >= len(self.cells[seq_id]) - max(1, self.min_rows - 1), "more than padding"
        at = self._index(seq_id, position)
        for held in self._held(seq_id):
            del held[at:]
        self.states[seq_id] = self.states[seq_id][:at]

    def copy(self, source: int, target: int, start: int = 0, stop: int = -1) -> None:
        assert not self.cells[target], f"seq_id {target} holds tokens already"
        if not self.kv_unified or self.sharing == "whole":
            assert (start, stop) == (0, -1), "only whole sequences can be copied"
            for of_source, of_target in zip(self._held(source), self._held(target), strict=True):
                of_target.extend(of_source)
            self.owned[target][:] = [next(self._numbers) for _ in self.owned[source]]
            self.states[target] = self.states[source]
            self.copying |= set() if self.kv_unified else {source, target}
            return
        assert self.sharing == "cells", "cells cannot be shared here"
        assert start == 0 <= stop <= 1 + self.last_position(source), f"{stop} of {self.last_position(source) + 1}"
        at = self._index(source, stop)
        for of_source, of_target in zip(self._held(source), self._held(target), strict=True):
            of_target.extend(of_source[:at])

    def share_prefix(self, source: int, target: int, n: int) -> None:
        assert self.sharing == "cells", "cells cannot be shared here"
        assert self.last_position(source) >= n - 1
        at = self._index(source, n)
        assert at == self._index(target, n), f"seq_ids {source} and {target} hold {n} positions in other cells"
        for of in (self.cells, self.places, self.made_with):
            assert of[source][:at] == of[target][:at], f"seq_ids {source} and {target} hold other tokens"
        self.owned[target][:at] = self.owned[source][:at]

    def save_part(self, seq_id: int) -> FakeState:
        assert self.sharing == "checkpoints", "this memory has no parts"
        assert self.states[seq_id] == self.cells[seq_id], "a state that is not that of its cells"
        return self._first(seq_id, len(self.states[seq_id]))

    def _first(self, seq_id: int, n: int) -> FakeState:
        """The part of a sequence after its first `n` cells."""
        adapters, places = tuple(self.made_with[seq_id][:n]), tuple(self.places[seq_id][:n])
        return FakeState(self.states[seq_id][:n], 1 << 18, adapters, places)

    def restore_part(self, seq_id: int, part: FakeState) -> None:
        assert self.sharing == "checkpoints", "this memory has no parts"
        if self.fail_restore:
            self.remove(seq_id)
            raise LlamaError("no room")
        n = len(part.tokens)
        assert self.cells[seq_id][:n] == part.tokens, f"seq_id {seq_id} holds other tokens than the part"
        for held in self._held(seq_id):
            del held[n:]
        self.states[seq_id] = part.tokens

    def first_cut(self, seq_id: int) -> int:
        return max(0, self.last_position(seq_id) + 1 - self.keeps) if self.keeps else NEVER

    def cut(self, seq_id: int, n: int) -> None:
        assert self.sharing == "checkpoints", "this memory has no windows"
        if n < self.first_cut(seq_id) or self.fail_restore:
            self.remove(seq_id)
            raise LlamaError("no window")
        self.restore_part(seq_id, self._first(seq_id, self._index(seq_id, n)))

    def copy_cut(self, source: int, target: int, n: int) -> FakeState | None:
        if n < self.first_cut(source):
            raise LlamaError("no window")
        part = self._first(source, self._index(source, n))
        if self.kv_unified:
            self.share_cells(source, target, part)
            return part
        self.restore_sequence(target, part)
        return None

    def share_cells(self, source: int, target: int, part: FakeState) -> None:
        assert (self.sharing, self.kv_unified) == ("checkpoints", True), "cells cannot be shared here"
        assert not self.cells[target], f"seq_id {target} holds tokens already"
        n = len(part.tokens)
        for of_source, of_target in zip(self._held(source), self._held(target), strict=True):
            of_target.extend(of_source[:n])
        self.restore_part(target, part)

    def clear(self) -> None:
        self.states = [b""] * self.n_seq_ids
        for seq_id in range(self.n_seq_ids):
            for held in self._held(seq_id):
                held.clear()

    def last_position(self, seq_id: int) -> int:
        return self.places[seq_id][-1][0] if self.places[seq_id] else -1

    def _held(self, seq_id: int) -> tuple[Any, ...]:
        """What is known of each cell, in lists of equal length."""
        return self.cells[seq_id], self.places[seq_id], self.owned[seq_id], self.made_with[seq_id]

    def add_text(self, seq_id: int, n: int) -> None:
        """As if it had computed `n` tokens 0."""
        for _ in range(n):
            position = self._free_position(seq_id)
            self._append(seq_id, 0, (position, position, position))

    def _append(self, seq_id: int, byte: int, place: Place) -> None:
        if self.sharing == "checkpoints":
            state, cells = self.states[seq_id], bytes(self.cells[seq_id])
            assert state == cells, f"the state of seq_id {seq_id} has seen {state!r}, its cells are of {cells!r}"
            self.states[seq_id] += bytes([byte])
        new = byte, place, next(self._numbers), self.adapters
        for held, each in zip(self._held(seq_id), new, strict=True):
            held.append(each)

    def _index(self, seq_id: int, position: int) -> int:
        """How many cells are before this position in time."""
        return bisect_left(self.places[seq_id], position, key=lambda place: place[0])

    def _free_position(self, seq_id: int) -> int:
        """The first position after all cells, in all dimensions."""
        at_end = self.places[seq_id][self._index(seq_id, self.last_position(seq_id)) :]
        return 1 + max((number for place in at_end for number in place), default=-1)

    def save_sequence(self, seq_id: int) -> FakeState:
        assert 0 <= seq_id < self.n_seq_ids, f"seq_id {seq_id}"
        if seq_id in self.shifted:
            raise LlamaError("shifted after the last decode")
        if seq_id in self.copying:
            raise LlamaError("only copied in the next decode")
        adapters, places = tuple(self.made_with[seq_id]), tuple(self.places[seq_id])
        return FakeState(bytes(self.cells[seq_id]), adapters=adapters, places=places)

    def read_state(self, data: npt.NDArray[np.uint8], form: Mapping[str, Any]) -> FakeState:
        adapters, places = (tuple(map(tuple, form[name])) for name in ("adapters", "places"))
        return FakeState(data.tobytes(), adapters=adapters, places=places)

    def restore_sequence(self, seq_id: int, state: FakeState) -> None:
        assert not self.cells[seq_id], f"seq_id {seq_id} holds tokens already"
        if self.fail_restore or seq_id in self.copying:
            raise LlamaError("no room, or only copied in the next decode")
        self.cells[seq_id] += state.tokens
        self.states[seq_id] = state.tokens
        self.owned[seq_id] += [next(self._numbers) for _ in state.tokens]
        self.made_with[seq_id] += state.adapters
        self.places[seq_id] += state.places
        assert self.n_used <= self.n_ctx, f"{self.n_used} cells used of {self.n_ctx}"

    def close(self) -> None:
        self.is_closed = True


def ubatches(seq_ids: list[int], n_ubatch: int) -> list[list[int]]:
    """The ubatches that llama.cpp makes of a batch where sequences have streams (`llama_batch_allocr::split_equal`), as
    places in the batch.

    From the first token that is left: the sequences of consecutive rising seq_ids that follow it in the batch, and as
    many tokens of each as the shortest of them has, and as fit.
    """
    left = list(range(len(seq_ids)))
    found = []
    while left:
        run = [seq_ids[left[0]]]
        for place in left:
            if seq_ids[place] == run[-1] + 1 and len(run) <= n_ubatch:
                run.append(seq_ids[place])
        tokens = [[place for place in left if seq_ids[place] == seq_id] for seq_id in run]
        n = min(max(1, n_ubatch // len(run)), *map(len, tokens))
        found.append(sorted(place for places in tokens for place in places[:n]))
        left = [place for place in left if place not in found[-1]]
    return found


class FakePooledContext(FakeContext):
    """Computes whole sequences from their first token on, and makes a vector of each: `vector(tokens)`."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self._vectors: dict[int, npt.NDArray[np.float32]] = {}

    def _write(self, batch: Batch, seq_ids: list[int]) -> None:
        n = batch.n_tokens
        assert batch.wants_logits[:n].all(), "every token must be an output"
        self._vectors = {}
        for seq_id, group in itertools.groupby(range(n), key=seq_ids.__getitem__):
            places = list(group)
            assert batch.positions[places].tolist() == list(range(len(places))), "a part of a sequence"
            assert not self.cells[seq_id], f"seq_id {seq_id} holds tokens already"
            self.cells[seq_id] += bytes(batch.tokens[places].tolist())
            self.owned[seq_id] += [next(self._numbers) for _ in places]
            self.made_with[seq_id] += [self.adapters] * len(places)
            self.places[seq_id] += [(at, at, at) for at in range(len(places))]
            self._vectors[seq_id] = vector(bytes(self.cells[seq_id]))
        assert self.n_used <= self.n_ctx, f"{self.n_used} cells used of {self.n_ctx}"

    def embedding(self, seq_id: int) -> npt.NDArray[np.float32]:
        return self._vectors[seq_id]

    def logits(self, n_outputs: int) -> npt.NDArray[np.float32]:
        raise AssertionError("a pooled context has no logits")


BAD = 59
"""A token of which `FakePooledContext` makes NaN."""


def vector(tokens: bytes) -> npt.NDArray[np.float32]:
    """float32[3] of these tokens; no others have it."""
    if BAD in tokens:
        return np.full(3, np.nan, np.float32)
    return np.array([len(tokens), zlib.crc32(tokens) % 9973, zlib.adler32(tokens) % 9973], np.float32)


class FakeProposer:
    """Drafts the most likely tokens of the fake model; one in `wrong_each` is wrong."""

    costs_compute = False

    def __init__(self, wrong_each: int = 4, acceptance: float = 0.8) -> None:
        self._wrong_each = wrong_each
        self._acceptance = acceptance
        self.known: dict[str, npt.NDArray[np.int32]] = {}
        """The tokens of the sequences that were seen and have not finished, by their ids."""

    def propose(self, sequences: Sequence[Seq], most: Sequence[int]) -> list[Draft | None]:
        for sequence in sequences:
            known = self.known.setdefault(sequence.id, sequence.tokens)
            assert known is sequence.tokens, f"{sequence.id} has other tokens, and was not finished"
        return [self._draft(sequence, n) for sequence, n in zip(sequences, most, strict=True)]

    def _draft(self, sequence: Seq, most: int) -> Draft | None:
        text, draft = bytearray(sequence.tokens[: sequence.n_tokens].tolist()), []
        assert sequence.n_pending == 1
        for _ in range(most):
            chance = zlib.crc32(text)
            draft.append(LIKELIEST_FIRST[mood(text, sequence.adapters)][chance % self._wrong_each == 0])
            if chance % 5 == 0:
                break
            text.append(draft[-1])
        return Draft(np.array(draft, np.int32), np.full(len(draft), self._acceptance)) if draft else None

    def finished(self, sequence: Seq) -> None:
        self.known.pop(sequence.id, None)

    def close(self) -> None:
        assert not self.known


def fake_engine(
    *,
    n_ctx: int = 64,
    n_batch: int = 8,
    n_parallel: int = 4,
    unified: bool = True,
    n_ctx_train: int = 4096,
    sharing: Sharing = "none",
    n_more_ids: int = 4,
    pooling: str | None = None,
    adapters: Sequence[AdapterInfo] = (),
    may_pad: bool = False,
    on_gpu: bool = False,
    min_rows: int = 1,
    n_ubatch: int = 0,
    keeps: int = 0,
    switches: bool = False,
    proposers: Sequence[Proposer] = (),
    head: Callable[[FakeContext], RowProposer] | None = None,
    media: MediaInput | None = None,
    reuse_costs: ReuseCosts = REUSE_COSTS,
    path: str = "fake.gguf",
    **settings: Any,
) -> BatchInferenceEngine:
    """An engine over a fresh `FakeContext`, which `context_of` gives; with `pooling`, a `FakePooledContext`.

    `head`: makes the draft head of the model (`tests.support.fake_heads.fake_head`).
    `n_more_ids`: seq_ids beyond `n_parallel`, where cells can be shared. `switches`: it starts with the layout that
    `unified` says, and may switch; `sharing` "cells" or "copy" is then what the layout has.
    """
    if switches and sharing in ("cells", "copy"):
        sharing = "cells" if unified else "copy"
    context = (FakePooledContext if pooling else FakeContext)(
        n_ctx=n_ctx,
        n_batch=n_batch,
        n_seq_max=n_parallel,
        kv_unified=unified,
        sharing=sharing,
        n_more_ids=n_more_ids if sharing == "cells" else 0,
        n_ubatch=n_ubatch,
        min_rows=min_rows,
        keeps=keeps,
    )

    def change_layout(layout: KvLayout) -> Sharing:
        unified, kind = layout == "unified", sharing
        if sharing in ("cells", "copy"):
            kind = "cells" if unified else "copy"
        context.reopen(n_ctx=n_ctx, kv_unified=unified, sharing=kind, n_more_ids=n_more_ids if kind == "cells" else 0)
        return kind

    layouts = None
    if switches:
        layouts = Layouts(change_layout, n_ctx // n_parallel)
    n_longest = n_batch if pooling else n_ctx if switches else context.n_ctx_seq
    info = ModelInfo(
        name="fake", path=path, description="a hash", size_bytes=0, n_params=0, n_vocab=N_VOCAB, n_ctx=n_ctx,
        kv_layout="auto" if switches else "unified" if unified else "per-sequence", sampling="host", on_gpu=on_gpu,
        n_ctx_train=n_ctx_train, bos="", eos="", chat_template=None,
        max_sequence=min(n_longest, n_ctx_train) - max(0, min_rows - 2), pooling=pooling, n_embd=3,
        adapters=tuple(adapters), modalities=media.encoder.modalities if media else (),
    )  # fmt: skip
    its_head = head(context) if head else None
    runtime = Runtime(
        context,
        FakeVocab(),
        info,
        sharing,
        context.close,
        may_pad=may_pad,
        min_rows=min_rows,
        layouts=layouts,
        proposers=(*proposers, its_head) if its_head else proposers,
        head=its_head,
        media=media,
        reuse_costs=reuse_costs,
    )
    return BatchInferenceEngine(path, runtime=runtime, n_ctx=n_ctx, n_batch=n_batch, n_parallel=n_parallel, **settings)


def context_of(engine: BatchInferenceEngine) -> FakeContext:
    context = engine.core.runtime.context
    assert isinstance(context, FakeContext)
    return context


def drain(engine: BatchInferenceEngine) -> list[GenerationEvent]:
    """Steps until there is nothing to do, and returns the events; fails if that never happens."""
    events: list[GenerationEvent] = []
    for _ in range(3000):
        if not engine.has_work:
            return events
        events += engine.step()
    raise AssertionError("the engine never comes to rest")


def run_steps(engine: BatchInferenceEngine, n: int) -> list[GenerationEvent]:
    """The events of `n` steps."""
    return [event for _ in range(n) for event in engine.step()]


def tokens_of(events: list[GenerationEvent], name: str) -> list[int]:
    """The tokens of one request."""
    return [token for event in events if event.request_id == name for token in event.tokens]


def greedy(max_tokens: int | None = None, **others: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **others)


def endless(max_tokens: int) -> SamplingParams:
    return greedy(max_tokens, ignore_eos=True)


def result_of(completion: Completion) -> tuple[list[int], str, FinishReason]:
    return completion.tokens, completion.text, completion.finish_reason


def n_computed(engine: BatchInferenceEngine) -> int:
    """Tokens that the engine's context has computed."""
    return sum(sum(step.values()) for step in context_of(engine).steps)


def cut_before_stop(text: str, stop: Sequence[str]) -> tuple[str, bool]:
    """Reads letter by letter; at the first stop string that is complete, cuts before it. And whether there was one."""
    for end in range(1, len(text) + 1):
        complete = [len(string) for string in stop if text[:end].endswith(string)]
        if complete:
            return text[: end - max(complete)], True
    return text, False


def text_of(tokens: list[int], *, final: bool = True) -> str:
    """The tokens' pieces as text. Unless `final`, an incomplete character at the end is left out."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    return decoder.decode(b"".join(PIECES[token] for token in tokens), final=final)


def reference(
    prompt: str | list[int], params: SamplingParams, adapters: AdapterSet = ()
) -> tuple[list[int], str, FinishReason]:
    """What the fake model answers to this prompt alone, greedily: tokens, text, finish reason."""
    assert params.max_tokens is not None
    read = FakeVocab().tokenize(prompt).tolist() if isinstance(prompt, str) else list(prompt)
    tokens: list[int] = []
    ends = EOG.union(params.stop_token_ids)
    while len(tokens) < params.max_tokens:
        never = ends if len(tokens) < params.min_tokens else EOG if params.ignore_eos else frozenset()
        token = next(t for t in LIKELIEST_FIRST[mood(bytes(read + tokens), adapters)] if t not in never)
        if token in ends:
            return tokens, text_of(tokens), FinishReason.STOP
        tokens.append(token)
        text, stopped = cut_before_stop(text_of(tokens, final=False), params.stop)
        if stopped:
            return tokens, text, FinishReason.STOP
    return tokens, text_of(tokens), FinishReason.LENGTH


def spell(text: str) -> list[int]:
    """The fake model's tokens of one letter each."""
    return [PIECES.index(letter.encode()) for letter in text]


def know(engine: BatchInferenceEngine | EngineCore, times: Mapping[int, float]) -> None:
    """Gives the scheduler these times, in seconds by numbers of rows, and stops it from measuring others."""
    scheduler = (engine if isinstance(engine, EngineCore) else engine.core).scheduler
    scheduler._budgets.of(()).cost.seed(times.items())
    scheduler.computed = lambda plan, seconds, decode_s=None: None  # type: ignore[method-assign]
