"""A sequence: a request in the engine, with its tokens and its status (`TRANSITIONS`)."""

from __future__ import annotations

from bisect import insort
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from cppbatch.config import MAX_DRAFT
from cppbatch.engine.cells import Span
from cppbatch.engine.lora_sets import AdapterSet
from cppbatch.engine.request import (
    BACKGROUND,
    FinishReason,
    GenerationEvent,
    GenerationRequest,
    Modality,
    RequestUsage,
    ResumeState,
    TokenLogprob,
)
from cppbatch.engine.vocabulary import Detokenizer
from cppbatch.setting import INT32_MAX

if TYPE_CHECKING:
    from cppbatch.engine.grammar.structured_output import Constraint
    from cppbatch.engine.reasoning_follower import ReasoningFollower
    from cppbatch.engine.sampling_plan import SamplingPlan


class MediaRun(msgspec.Struct, frozen=True, eq=False):
    """Consecutive placeholder tokens of a prompt, for the vectors of an image, a part of one, or audio."""

    start: int
    """The index of the first one in the prompt."""
    vectors: npt.NDArray[np.float32]
    """float32[n, n_embd]."""
    is_whole: bool
    """Whether one step must compute all of them, because they attend to each other."""
    kind: Modality
    n_positions: int
    """The number of positions it takes: usually one per vector."""
    positions: npt.NDArray[np.int32] | None = None
    """int32[4, n], if positions have several dimensions (M-RoPE): time, row and column of each vector, from 0, and a 0.
    None: positions have one dimension, and ascend."""

    @property
    def stop(self) -> int:
        """The index after the last one."""
        return self.start + len(self.vectors)


_NO_TOKENS = np.empty(0, np.int32)


class SeqStatus(Enum):
    """The status of a sequence. Only `Seq` changes it."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    SWAPPED = "swapped"
    """Preempted; its keys and values are in host memory until it resumes."""
    FINISHED = "finished"


TRANSITIONS: dict[SeqStatus, frozenset[SeqStatus]] = {
    SeqStatus.WAITING: frozenset((SeqStatus.PREFILL, SeqStatus.DECODE, SeqStatus.FINISHED)),
    SeqStatus.PREFILL: frozenset((SeqStatus.DECODE, SeqStatus.SWAPPED, SeqStatus.WAITING, SeqStatus.FINISHED)),
    SeqStatus.DECODE: frozenset((SeqStatus.PREFILL, SeqStatus.SWAPPED, SeqStatus.WAITING, SeqStatus.FINISHED)),
    SeqStatus.SWAPPED: frozenset((SeqStatus.PREFILL, SeqStatus.DECODE, SeqStatus.WAITING, SeqStatus.FINISHED)),
    SeqStatus.FINISHED: frozenset(),
}
"""The allowed status changes, made by the methods of `Seq` under "changes of tokens and status"."""


class StepOutput(msgspec.Struct):
    """The new part of a sequence since its last event: first the tokens, later their text. See `OutputProcessor`."""

    sequence: Seq
    tokens: list[int] = msgspec.field(default_factory=list)
    logprobs: dict[int, TokenLogprob] = msgspec.field(default_factory=dict)
    """Log-probabilities by index in `tokens`."""
    starts_text: bool = False
    """Whether the prompt's text precedes these tokens (`echo`)."""
    finish_reason: FinishReason | None = None
    """Set in the last output of the sequence."""
    usage: RequestUsage | None = None
    """Set in the last output of the sequence, and in others as requested (`usage_events`)."""
    n_detokenized: int = 0
    """Tokens whose text is in `text`."""
    text: str = ""
    end_logprob: TokenLogprob | None = None
    """For the end token, which ended the sequence and has no text."""
    token_texts: list[str] = msgspec.field(default_factory=list)
    """The text of each of these tokens."""
    text_logprobs: list[TokenLogprob] = msgspec.field(default_factory=list)
    """Log-probabilities with their offsets in the text."""
    event: GenerationEvent | None = None
    """Set when the text is complete."""


class SamplerState(Protocol):
    """A sequence's own sampler chain, which keeps the tokens so far."""

    left: tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]] | None
    """With `post_sampling_probs`: the ids and logits of the candidates for the last token."""

    def sample(self, row: npt.NDArray[np.float32], seed: int) -> int: ...
    def close(self) -> None: ...


class SavedState(Protocol):
    """The keys and values of a sequence in host memory (`cppbatch.llama.SequenceState`)."""

    @property
    def n_bytes(self) -> int: ...
    @property
    def data(self) -> npt.NDArray[np.uint8]: ...
    @property
    def form(self) -> dict[str, Any]: ...


class DiskRead(Protocol):
    """A pending or finished read of a prefix from disk; also the result that there is none."""

    done: bool


class Seq:
    """A request in the engine: its known tokens, the number of computed ones, and its text so far (`text`).

    `tokens` has the prompt and the completion, and room for a draft. The first `n_tokens` are known; the first
    `n_computed` have their keys and values in the cache; those in between are pending. Prefill and decode both compute
    pending tokens. Computing the last one yields logits for the next token. The known tokens may be followed by a
    draft, which a step computes with them: each of its tokens yields logits too.

    With context shifts, tokens leave `tokens` when it has `n_ctx` of them: `shift` moves tokens after the first
    `n_keep` to `dropped`. So the whole text (`known_tokens`) is `tokens[:n_keep]`, `dropped`, the rest of `tokens`.

    Positions in llama.cpp's memory follow from the tokens (`position_of`). They equal the tokens' indices, except for
    images whose positions have several dimensions: all tokens of an image have the same position in time, and the
    following text continues after as many positions as the longer side of the image has tokens.

    Images and audio are runs of negative ids (`media`), which are equal for equal files. These are only for comparing
    tokens: code that uses ids as vocabulary entries reads `text_tokens`.
    """

    __slots__ = (
        "_status",
        "adapters",
        "admitted_at",
        "arrived_at",
        "cells",
        "constraint",
        "disk_read",
        "draft",
        "dropped",
        "echoed",
        "embedding",
        "error",
        "error_field",
        "first_token_at",
        "has_end_token",
        "max_new",
        "media",
        "moving",
        "n_accepted",
        "n_cached",
        "n_computed",
        "n_computed_before",
        "n_ctx",
        "n_drafted",
        "n_exact",
        "n_keep",
        "n_output",
        "n_prompt",
        "n_shifts",
        "n_tokens",
        "output",
        "params",
        "prediction",
        "prefill_stops",
        "prompt_logprobs",
        "rank",
        "reasoning",
        "request",
        "sampler",
        "sampling",
        "saved",
        "seed",
        "seq_id",
        "text",
        "tokens",
    )  # fmt: skip

    sampling: SamplingPlan
    """The sampling of its tokens. Set by `InputProcessor`."""

    def __init__(
        self,
        request: GenerationRequest,
        prompt: npt.NDArray[np.int32],
        *,
        max_new: int,
        seed: int,
        now: float,
        n_ctx: int | None = None,
        n_keep: int = 0,
        adapters: AdapterSet = (),
        prediction: npt.NDArray[np.int32] | None = None,
        media: tuple[MediaRun, ...] = (),
    ) -> None:
        """`n_ctx`: maximum known tokens; None: `max_new` is the limit. A longer text drops tokens after the first
        `n_keep`. `media`: which tokens of the prompt are placeholders, in order; such a text does not drop tokens."""
        self.request = request
        self.params = request.params
        self.adapters = adapters
        self.media = media
        self.prediction = prediction  # int32[n], n >= 1: expected tokens of the completion
        self.n_prompt = self.n_tokens = len(prompt)
        self.max_new = max_new
        self.n_ctx = self.n_prompt + max_new if n_ctx is None else n_ctx
        self.n_keep = n_keep
        self.tokens = np.empty(min(self.n_ctx, self.n_prompt + max_new) + MAX_DRAFT, np.int32)
        self.tokens[: self.n_prompt] = prompt
        self.dropped = _NO_TOKENS
        self.n_shifts = 0
        self.output = StepOutput(self)
        # Index in the text after the last token that is in `output` or was in an earlier output.
        self.n_output = self.n_prompt
        self.n_computed = 0
        self.n_computed_before = 0  # its first tokens whose computed keys and values were lost
        self.n_exact = INT32_MAX  # from here on, keys and values differ from those of a prompt of `tokens`
        self.n_cached = 0  # prompt tokens taken from the prefix cache
        self.n_drafted = 0  # draft tokens that were computed
        self.n_accepted = 0  # draft tokens that were accepted
        self.draft: list[int] = []  # tokens that this step computes after the known ones, while they may be right
        self.seed = seed
        self.rank = (0.0, 0)  # lower runs first; set by `Scheduler.add`
        self.seq_id = -1
        self.cells: Span | None = None
        self._status = SeqStatus.WAITING
        self.moving = False  # its keys and values are restored or copied by the next `KVPool.apply`
        self.prefill_stops: list[int] = []  # ascending: prompt pieces end there, so that others reuse what precedes
        self.saved: SavedState | None = None
        self.disk_read: DiskRead | None = None  # the read of a prefix for it; set by the first lookup on disk
        self.text = Detokenizer(self.params.stop, include_stop=self.params.include_stop)
        self.echoed = 0  # characters of the prompt at the start of its text (`echo`)
        self.constraint: Constraint | None = None
        self.reasoning: ReasoningFollower | None = None  # set if it has a budget
        self.sampler: SamplerState | None = None
        self.prompt_logprobs: list[TokenLogprob] = []
        self.embedding: bytes | None = None  # the result of an embedding request
        self.error: str | None = None
        self.error_field: str | None = None  # the field of the request that caused the error
        self.has_end_token = False  # whether an end token ended it, which is not among `tokens`
        self.arrived_at = now
        self.admitted_at = self.first_token_at = 0.0

    @property
    def status(self) -> SeqStatus:
        """The current status; read-only."""
        return self._status

    @property
    def id(self) -> str:
        """The request's id."""
        return self.request.id

    @property
    def salt(self) -> tuple[str, AdapterSet]:
        """The `cache_salt` and the adapters: only sequences with the same salt can share a prefix."""
        return self.request.cache_salt, self.adapters

    @property
    def is_background(self) -> bool:
        """Whether its priority is `BACKGROUND`: no client is waiting for it."""
        return self.request.priority >= BACKGROUND

    @property
    def n_pending(self) -> int:
        """Known tokens that are not computed yet."""
        return self.n_tokens - self.n_computed

    @property
    def n_generated(self) -> int:
        """Tokens of the completion so far."""
        return self.n_text - self.n_prompt

    @property
    def n_text(self) -> int:
        """Tokens of prompt and completion so far, including dropped ones."""
        return self.n_tokens + len(self.dropped)

    @property
    def is_full(self) -> bool:
        """Whether it must drop tokens (`shift`) before it continues."""
        return self.n_tokens >= self.n_ctx and self.n_left > 0

    @property
    def n_room(self) -> int:
        """The number of tokens that may be appended before the text ends, or tokens must be dropped."""
        return min(self.n_left, self.n_ctx - self.n_tokens)

    @property
    def n_left(self) -> int:
        """The number of tokens that may still be generated."""
        return self.max_new - self.n_generated

    @property
    def is_scored(self) -> bool:
        """Whether log-probabilities of its prompt are still missing: then each prompt token needs logits."""
        return self.params.scores_prompt and not self.n_generated and len(self.prompt_logprobs) < self.n_prompt

    def n_logits(self, n: int) -> int:
        """How many of its next `n` tokens (pending ones, then a draft) need logits; these are the last ones."""
        return n if self.is_scored or self.request.task == "embed" else max(0, n - self.n_pending + 1)

    def text_tokens(self, start: int) -> npt.NDArray[np.int32]:
        """The known tokens from index `start`, without the placeholders of images and audio."""
        tokens = self.known_tokens(start)
        return tokens[tokens >= 0] if self.media else tokens

    def known_tokens(self, start: int) -> npt.NDArray[np.int32]:
        """All tokens of prompt and completion from index `start`, int32[n], including dropped ones."""
        keep, n_dropped = self.n_keep, len(self.dropped)
        if not n_dropped or start >= keep + n_dropped:
            return self.tokens[start - n_dropped : self.n_tokens]
        kept, rest = self.tokens[min(start, keep) : keep], self.tokens[keep : self.n_tokens]
        return np.concatenate([kept, self.dropped[max(0, start - keep) :], rest])

    # --- images and audio ---------------------------------------------------------------------------------------

    @property
    def n_media(self) -> int:
        """Tokens of the prompt that are placeholders of images and audio."""
        return sum(len(run.vectors) for run in self.media)

    @property
    def next_run(self) -> MediaRun | None:
        """The image or audio of the next pending token; None: it is text."""
        return next((run for run in self.media if run.start <= self.n_computed < run.stop), None)

    @property
    def piece_end(self) -> int:
        """The index up to which pending tokens can be computed together: all text, or all of one image."""
        for run in self.media:
            if self.n_computed < run.stop:
                return run.start if self.n_computed < run.start else run.stop
        return self.n_tokens

    def stop_at(self, n: int) -> None:
        """Makes a piece of its prompt end after the first `n` tokens."""
        if n > self.n_computed and n not in self.prefill_stops:
            insort(self.prefill_stops, n)

    def media_vectors(self, n: int) -> npt.NDArray[np.float32]:
        """The vectors of the next `n` pending tokens, float32[n, n_embd]: part of `next_run`."""
        run = self.next_run
        assert run
        return run.vectors[self.n_computed - run.start : self.n_computed - run.start + n]

    def media_positions(self, n: int) -> npt.NDArray[np.int32]:
        """The positions of these vectors, int32[1, n], or int32[4, n] with several dimensions."""
        run = self.next_run
        assert run
        first = self.n_computed - run.start
        positions: npt.NDArray[np.int32]
        if run.positions is None:
            positions = np.arange(self.position, self.position + n, dtype=np.int32)[None]
        else:
            positions = run.positions[:, first : first + n].copy()
            positions[:3] += self.position_of(run.start)
        return positions

    def position_of(self, index: int) -> int:
        """The position of a token; for an image with several position dimensions, that in time."""
        position = index
        for run in self.media:
            if index < run.stop:
                if run.positions is not None and index > run.start:
                    position += int(run.positions[0, index - run.start]) - (index - run.start)
                break
            position += run.n_positions - len(run.vectors)
        return position

    def span(self, n: int) -> int:
        """The number of positions, from 0, that only the first `n` tokens have. `n` must not be within an image, unless
        it is the number of computed tokens."""
        return self.position_of(n - 1) + 1 if self.media and n else n

    @property
    def position(self) -> int:
        """The position of the next pending token."""
        return self.position_of(self.n_computed) if self.media else self.n_computed

    @property
    def n_positions(self) -> int:
        """The number of positions, from 0, of its computed tokens."""
        return self.span(self.n_computed)

    def before_media(self, n: int) -> int:
        """The largest number of tokens up to `n` that does not end within an image, and so can be shared."""
        return next((run.start for run in self.media if run.start < n < run.stop), n)

    # --- changes of tokens and status ---------------------------------------------------------------------------

    def resume(self, state: ResumeState) -> None:
        """Adds the tokens that it got from a crashed engine; `OutputProcessor.resume` detokenises them."""
        at = 0
        while at < len(state.tokens):
            if self.is_full:
                self.shift()
            new = state.tokens[at : at + self.n_ctx - self.n_tokens]
            self.tokens[self.n_tokens : self.n_tokens + len(new)] = new
            self.n_tokens += len(new)
            at += len(new)
        if self.is_full:
            self.shift()
        self.arrived_at -= state.age
        if state.tokens:
            self.admitted_at = self.first_token_at = self.arrived_at + state.first_token_seconds
            if self.constraint:
                self.constraint.rebuild(state.tokens)

    def admitted(self) -> None:
        """Gives the sequence a seq_id, with `n_computed` tokens in cells (possibly only after the next
        `KVPool.apply`)."""
        self.prefill_stops = [n for n in self.prefill_stops if n > self.n_computed]
        only_one_pending = self.n_computed > 0 and self.n_pending == 1
        self._set_status(SeqStatus.DECODE if only_one_pending else SeqStatus.PREFILL)

    def computed(self, n: int) -> None:
        """Marks the next `n` pending tokens as computed."""
        self.n_computed += n
        if self.n_computed == self.n_tokens:
            self._set_status(SeqStatus.DECODE)

    def set_draft(self, draft: list[int], n: int) -> None:
        """Makes the next step compute `n` tokens after the known ones: this draft, then filling tokens."""
        self.draft, end = draft, self.n_tokens + len(draft)
        self.tokens[self.n_tokens : end] = draft
        self.tokens[end : self.n_tokens + n] = self.tokens[self.n_tokens - 1]

    def verify_draft(self) -> int:
        """How many pending tokens the step has already computed, because they are the next ones of its draft.

        Tokens drafted after the first wrong one are dropped.
        """
        n_most = min(self.n_pending, len(self.draft))
        known = self.tokens[self.n_computed : self.n_computed + n_most].tolist()
        n = next((i for i in range(n_most) if known[i] != self.draft[i]), n_most)
        self.draft = self.draft[n:] if n == self.n_pending else []
        return n

    def append(self, token: int) -> None:
        """Adds a token of the completion."""
        self.tokens[self.n_tokens] = token
        self.n_tokens += 1
        if self.n_pending > 1 and self._status is SeqStatus.DECODE:  # a forced token: a decode row computes only one
            self._set_status(SeqStatus.PREFILL)

    def shift(self) -> int:
        """Drops tokens after the first `n_keep`: the requested number, or half of them. Returns their number.

        As in llama-server, where the last token is not counted because it is not in the cache yet. Afterwards the
        sequence has a new array `tokens`, so views of the old one keep the old tokens. The caller drops them from the
        cache.
        """
        keep, n_may_go = self.n_keep, self.n_tokens - 1 - self.n_keep
        n = max(1, min(self.request.n_discard or n_may_go // 2, n_may_go - 1))
        tokens = np.empty_like(self.tokens)
        tokens[:keep] = self.tokens[:keep]
        tokens[keep : self.n_tokens - n] = self.tokens[keep + n : self.n_tokens]
        dropped = np.concatenate([self.dropped, self.tokens[keep : keep + n]])
        self.prefill_stops = []
        # Together: an interrupted step must not leave one without the others.
        self.tokens, self.dropped, self.n_tokens, self.n_shifts = tokens, dropped, self.n_tokens - n, self.n_shifts + 1
        self.draft, self.n_computed_before = [], 0
        return n

    def preempted(self) -> None:
        """Takes its cells and seq_id from the sequence, which resumes later."""
        self._set_status(SeqStatus.SWAPPED)

    def will_recompute(self) -> None:
        """Makes all tokens pending again, because keys and values are lost (not saved, or not restored)."""
        self.n_computed_before = max(self.n_computed_before, min(self.n_computed, self.n_tokens))
        self.n_computed, self.n_exact = 0, INT32_MAX
        self._set_status(SeqStatus.WAITING if self.seq_id < 0 else SeqStatus.PREFILL)

    def restarted(self) -> None:
        """Makes the sequence wait with all tokens pending, after the KV cache was emptied."""
        self.seq_id = -1
        self.cells = self.saved = None
        self.moving = False
        self.draft = []
        self.n_computed_before = max(self.n_computed_before, self.n_computed)
        self.n_computed, self.n_exact = 0, INT32_MAX
        self._set_status(SeqStatus.WAITING)
        if self.constraint:
            self.constraint.rebuild(self.text_tokens(self.n_prompt).tolist())

    def n_recomputed(self, n: int) -> int:
        """How many of its next `n` tokens to compute were computed before."""
        return max(0, min(n, self.n_computed_before - self.n_computed))

    def finished(self) -> None:
        """Ends the sequence, for any reason."""
        self._set_status(SeqStatus.FINISHED)

    def _set_status(self, status: SeqStatus) -> None:
        """Raises `AssertionError` for a change that is not in `TRANSITIONS`."""
        if status is self._status:
            return
        if status not in TRANSITIONS[self._status]:
            raise AssertionError(f"{self.id} cannot change from {self._status.value} to {status.value}")
        self._status = status

    @property
    def in_first_prefill(self) -> bool:
        """Whether part of its prompt was never computed, as far as this engine knows."""
        return self.n_computed < self.n_prompt and not self.n_generated and not self.first_token_at

    def usage(self, now: float) -> RequestUsage:
        """Counts and times so far."""
        queued_until = self.admitted_at or now
        return RequestUsage(
            prompt_tokens=self.n_prompt,
            n_media_tokens=self.n_media,
            n_audio_tokens=sum(len(run.vectors) for run in self.media if run.kind == "audio"),
            # After a preemption, the sequence may also find tokens of its completion in the prefix cache.
            cached_tokens=min(self.n_cached, self.n_prompt),
            prefilled_tokens=self.n_prompt
            if self.n_generated or self.first_token_at
            else min(max(self.n_computed, self.n_computed_before), self.n_prompt),
            completion_tokens=self.n_generated + self.has_end_token,
            context_shifts=self.n_shifts,
            drafted_tokens=self.n_drafted,
            accepted_tokens=self.n_accepted,
            queue_seconds=queued_until - self.arrived_at,
            first_token_seconds=max(0.0, self.first_token_at - self.arrived_at) if self.first_token_at else 0.0,
            total_seconds=now - self.arrived_at,
        )
