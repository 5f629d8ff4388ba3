"""Converts a request to a sequence: tokenises, validates, and refuses it if it can never run."""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import accumulate, pairwise
from time import perf_counter, sleep

import numpy as np
import numpy.typing as npt

from cppbatch.chat.media_parts import PlainText
from cppbatch.config import setting_name
from cppbatch.engine.grammar.structured_output import GrammarCompiler
from cppbatch.engine.lora_sets import set_of_request
from cppbatch.engine.media.input import MediaInput
from cppbatch.engine.model_info import ModelInfo
from cppbatch.engine.params import DEFAULT_MAX_TOKENS, UNLIMITED, actual_seed, token_ids
from cppbatch.engine.reasoning_follower import ReasoningFollower
from cppbatch.engine.request import (
    GenerationRequest,
    Media,
    MediaPrompt,
    Modality,
    Pair,
    TokenPiece,
    is_long,
    text_of_part,
)
from cppbatch.engine.sampling_plan import check_ids, make_sampling_plan
from cppbatch.engine.sequence import MediaRun, Seq
from cppbatch.engine.vocabulary import IsCancelled, Vocabulary, never_cancelled
from cppbatch.errors import ContextOverflow, EngineClosed, InvalidRequest

_MODALITIES: dict[Modality, str] = {"image": "images", "audio": "audio"}
_PLACEHOLDER = re.compile(r"\{(query|document)\}")


class InputProcessor:
    """Creates a `Seq` from a `GenerationRequest`. Later code does not validate again. Thread-safe."""

    def __init__(
        self,
        vocab: Vocabulary,
        info: ModelInfo,
        *,
        context_shift: bool = False,
        n_keep: int = 0,
        media: MediaInput | None = None,
        waits_for_room: bool = False,
    ) -> None:
        """`context_shift`, `n_keep`: the settings of `EngineConfig`. `media`: encodes images and audio; None: text
        only. `waits_for_room`: `process` may wait until sequences have ended (`MediaInput.wait_for_room`)."""
        self._vocab = vocab
        self._media = media
        self._waits_for_room = waits_for_room
        self._info = info
        self._context_shift, self._n_keep = context_shift, n_keep
        self._grammars = GrammarCompiler(vocab.for_grammars)
        self._last_long: tuple[str, npt.NDArray[np.int32]] | None = None
        self._is_closed = False
        self._readers = Counter[int]()  # the threads that read the vocabulary, with their calls
        self._lock = threading.RLock()  # no Condition, whose lock stays held if Ctrl-C interrupts its `__enter__`

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Keeps the model open meanwhile: `close` waits. Raises `EngineClosed`."""
        thread = threading.get_ident()
        with self._lock:
            if self._is_closed:
                raise EngineClosed("the engine is closed")
            self._readers[thread] += 1
        try:
            yield
        finally:
            with self._lock:
                self._readers[thread] -= 1
                if not self._readers[thread]:
                    del self._readers[thread]

    def process(
        self,
        request: GenerationRequest,
        cancelled: IsCancelled = never_cancelled,
        *,
        arrived_at: float | None = None,
        patient: bool = True,
    ) -> Seq:
        """Tokenises the prompt, checks all limits, and compiles the grammar.

        `arrived_at`: when the request arrived, in seconds of `perf_counter`; None: now. Raises `InvalidRequest` naming
        the invalid field, `RequestCancelled`, `EngineClosed`; unless `patient`, `SlowGrammar`.
        """
        with self._reading():
            return self._process(request, cancelled, perf_counter() if arrived_at is None else arrived_at, patient)

    def _process(self, request: GenerationRequest, cancelled: IsCancelled, arrived_at: float, patient: bool) -> Seq:
        self._check_task(request)
        runs: tuple[MediaRun, ...] = ()
        if isinstance(request.prompt, MediaPrompt):
            prompt, runs = self._media_tokens(request, request.prompt, cancelled)
        else:
            prompt = self._tokens(request.prompt, cancelled)
        limit, n = self._info.max_sequence, len(prompt)
        adapters = set_of_request(request, self._info)
        if request.task == "embed":
            if n > limit:
                raise self._too_long("prompt", f"has {n} tokens", n)
            return Seq(request, prompt, max_new=0, seed=0, now=arrived_at, adapters=adapters)
        if n >= limit:
            raise self._too_long("prompt", f"has {n} tokens", n, purpose=" for prompt and answer")
        shifts = self._context_shift and not runs
        max_new = self._max_new(request, n, shifts=shifts)
        prediction = self._prediction(request, cancelled)
        plan = make_sampling_plan(request.params, self._vocab, limit)
        is_expired = request.timeout is not None and perf_counter() >= arrived_at + request.timeout  # it gets no token
        constraint = None if is_expired else self._grammars.constraint(request.params, patient=patient)
        sequence = Seq(
            request,
            prompt,
            max_new=max_new,
            seed=actual_seed(request.params.seed),
            now=arrived_at,
            n_ctx=limit,
            n_keep=self._resolve_n_keep(request, n) if shifts else 0,
            adapters=adapters,
            prediction=prediction,
            media=runs,
        )
        sequence.sampling, sequence.constraint = plan, constraint
        if budget := request.params.reasoning_budget:
            closing = self._vocab.tokenize(budget.closing, add_special=False).tolist()
            piece = partial(self._vocab.piece, special=True)
            has_grammar = constraint is not None and constraint.is_active
            sequence.reasoning = ReasoningFollower(budget, closing, piece, has_grammar=has_grammar)
        return sequence

    def check_resumed(self, sequence: Seq, n: int) -> None:
        """Raises `InvalidRequest` if a sequence that an earlier engine, with a larger context, has given `n` tokens
        cannot have another one here."""
        if n and n >= sequence.max_new:
            what = f"and the {n} tokens of the text so far are {sequence.n_prompt + n} tokens"
            raise self._too_long("prompt", what, sequence.n_prompt + n)

    def _max_new(self, request: GenerationRequest, n: int, *, shifts: bool) -> int:
        """The maximum generated tokens of a request with a prompt of `n` tokens.

        With context shifts, a text may be longer than the context; an unlimited one ends after the model's context
        length, because some models never end a text.
        """
        wanted, room = request.params.max_tokens, self._info.max_sequence - n
        if wanted == UNLIMITED:
            return max(room, self._info.n_ctx_train) if shifts else room
        if wanted is None:
            wanted = max(DEFAULT_MAX_TOKENS, request.params.min_tokens)
            return wanted if shifts else min(wanted, room)
        if shifts:
            return wanted
        if wanted > room and not request.clamp_max_tokens:
            message = (
                f"is {wanted}: with a prompt of {n} tokens, that is {n + wanted} in total, but {self._limit_text()}"
            )
            raise InvalidRequest("max_tokens", message)
        return min(wanted, room)

    def _resolve_n_keep(self, request: GenerationRequest, n: int) -> int:
        """The number of initial tokens kept when the context is full, as in llama-server. `n`: tokens of the prompt."""
        wanted = self._n_keep if request.n_keep is None else request.n_keep
        wanted = (n if wanted < 0 else wanted) + self._vocab.adds_bos
        # a context shift drops at least 4 tokens
        return max(0, min(wanted, self._info.max_sequence - 4))

    def tokens(
        self,
        text: str | list[int] | MediaPrompt,
        *,
        add_special: bool = True,
        parse_special: bool = True,
        cancelled: IsCancelled = never_cancelled,
    ) -> list[TokenPiece]:
        """See `BatchInferenceEngine.tokens`. `cancelled`: polled; if True, raises `RequestCancelled`."""
        with self._reading():
            if isinstance(text, MediaPrompt):
                self._check_modalities(text)
                parts = self._tokens_of_parts(text, cancelled)
                return [piece for part in parts for piece in self._pieces_of_part(part, cancelled)]
            if isinstance(text, str):
                ids = self._vocab.tokenize(
                    text,
                    add_special=add_special,
                    add_eos=self._adds_eos,
                    parse_special=parse_special,
                    cancelled=cancelled,
                )
                return self._pieces(ids)
            return self._pieces(check_ids("tokens", token_ids("tokens", text), self._vocab.n_tokens))

    def _pieces(self, ids: npt.NDArray[np.int32]) -> list[TokenPiece]:
        distinct = np.unique(ids).tolist()
        pieces = {token: TokenPiece(token, self._vocab.piece(token, special=True)) for token in distinct}
        return [pieces[token] for token in ids.tolist()]

    @property
    def _adds_eos(self) -> bool:
        """Whether EOS ends texts for which the model uses it: not before text that is to be generated."""
        return bool(self._info.pooling)

    def _pieces_of_part(self, part: npt.NDArray[np.int32] | Media, cancelled: IsCancelled) -> list[TokenPiece]:
        """Without bytes for an image or audio clip."""
        if not isinstance(part, Media):
            return self._pieces(part)
        assert self._media
        # tokens of images and audio are only counted: they have the id -1
        return [TokenPiece(-1, b"")] * self._media.n_tokens(part, cancelled)

    def _tokens_of_parts(self, prompt: MediaPrompt, cancelled: IsCancelled) -> Iterator[npt.NDArray[np.int32] | Media]:
        """The media of a prompt, and the tokens of the texts between them, int32[n]: each is tokenised separately, as
        in llama.cpp. BOS comes first if the model uses it."""
        texts: list[str | PlainText] = []
        adds_bos = True
        for part in [*prompt.parts, None]:
            if isinstance(part, str | PlainText):
                texts.append(part)
                continue
            if texts or adds_bos:
                yield self._tokens_of_texts(texts, cancelled, adds_bos=adds_bos)
                texts, adds_bos = [], False
            if part is not None:
                yield part

    def _tokens_of_texts(
        self, texts: list[str | PlainText], cancelled: IsCancelled, *, adds_bos: bool
    ) -> npt.NDArray[np.int32]:
        ends = [0, *accumulate(len(text_of_part(text)) for text in texts)]
        plain = [span for text, span in zip(texts, pairwise(ends), strict=True) if isinstance(text, PlainText)]
        text = "".join(map(text_of_part, texts))
        return self._vocab.tokenize(text, add_special=adds_bos, add_eos=False, plain=plain, cancelled=cancelled)

    def is_quick(self, request: GenerationRequest) -> bool:
        """Whether `process` only takes milliseconds: a short text, and no grammar to compile."""
        texts = request.prompt, request.prediction or ""
        return not any(map(is_long, texts)) and self._grammars.is_compiled(request.params)

    def close(self) -> None:
        """Stops the process that compiles grammars, and waits for the calls of other threads."""
        with self._lock:
            self._is_closed = True
        self._grammars.close()
        end = perf_counter() + 60.0  # a thread that never returns must not keep the engine from closing
        while self._others_read() and perf_counter() < end:
            sleep(0.002)

    def _others_read(self) -> bool:
        with self._lock:
            return bool(self._readers.keys() - {threading.get_ident()})

    def _check_task(self, request: GenerationRequest) -> None:
        info = self._info
        if info.pooling and request.task == "generate":
            kind = (
                "a reranker"
                if info.pooling == "rank"
                else f"an embedding model ({setting_name('pooling')} is {info.pooling!r})"
            )
            raise InvalidRequest(
                "task", f"{info.name} runs as {kind} and does not generate text; use a model that does"
            )
        if request.task == "embed" and not info.pooling:
            message = "generates text; for embeddings, use an embedding model, or set pooling='mean' (--pooling mean)"
            raise InvalidRequest("task", f"{info.name} {message}")

    def _too_long(self, field: str, what: str, n: int, *, is_least: bool = False, purpose: str = "") -> InvalidRequest:
        """The error for a field with too many tokens, `n` (`is_least`: or more); `what` describes them."""
        overflow = None
        if field == "prompt":
            limit = self._info.max_sequence
            overflow = ContextOverflow(
                n_prompt_tokens=n,
                n_ctx=limit,
                advice=self._advice(),
                is_pooled=bool(self._info.pooling),
                is_least=is_least,
            )
        return InvalidRequest(field, f"{what}, but {self._limit_text()}{purpose}", overflow)

    def _limit_text(self) -> str:
        limit = self._info.max_sequence
        if limit == self._info.n_ctx_train:
            return f"the limit of this model is {limit}"
        holder = "a step, in which it must be computed whole," if self._info.pooling else "this context"
        return f"{holder} holds only {limit} ({self._advice()} for more)"

    def _advice(self) -> str:
        """How to allow longer requests; "" if the model does not support them."""
        limit = self._info.max_sequence
        if limit == self._info.n_ctx_train:
            return ""
        if self._info.pooling:
            return f"raise {setting_name('n_batch')}, and {setting_name('n_ctx')} if lower,"
        raised = f"raise {setting_name('n_ctx')}"
        return raised if limit == self._info.n_ctx else f"{raised} or lower {setting_name('n_parallel')}"

    def _prediction(self, request: GenerationRequest, cancelled: IsCancelled) -> npt.NDArray[np.int32] | None:
        """The tokens of the request's `prediction`, int32[n]; None: no prediction."""
        prediction = request.prediction
        if not prediction:
            return None
        self._refuse_long("prediction", prediction)
        if isinstance(prediction, str):
            tokens = self._vocab.tokenize(prediction, add_special=False, parse_special=False, cancelled=cancelled)
        else:
            tokens = check_ids("prediction", prediction, self._vocab.n_tokens)
        if len(tokens) > self._info.max_sequence:
            raise self._too_long("prediction", f"has {len(tokens)} tokens", len(tokens))
        return tokens if len(tokens) else None

    def _tokens(self, prompt: str | list[int] | Pair, cancelled: IsCancelled) -> npt.NDArray[np.int32]:
        self._refuse_long("prompt", prompt)
        if isinstance(prompt, str):
            is_empty = not prompt and not self._info.pooling  # embedding models add special tokens
            tokens = np.empty(0, np.int32) if is_empty else self._tokenize(prompt, cancelled)
        elif isinstance(prompt, list):
            tokens = check_ids("prompt", prompt, self._vocab.n_tokens)
        else:
            tokens = self._pair(prompt)
        if len(tokens) == 0:  # some vocabularies have no token for some texts
            raise InvalidRequest("prompt", f"is empty ({prompt!r} has no tokens); give at least one")
        return tokens

    def _media_tokens(
        self, request: GenerationRequest, prompt: MediaPrompt, cancelled: IsCancelled
    ) -> tuple[npt.NDArray[np.int32], tuple[MediaRun, ...]]:
        """The tokens of a prompt of several parts, int32[n], and which of them are placeholders."""
        self._check_media(request, prompt)
        if self._media and self._waits_for_room and prompt.media:
            self._media.wait_for_room(cancelled)
        tokens: list[npt.NDArray[np.int32]] = []
        runs: list[MediaRun] = []

        def n_tokens() -> int:
            return sum(map(len, tokens))

        def check(n_more: int) -> None:
            if n_tokens() + n_more >= self._info.max_sequence:
                n = n_tokens() + n_more
                raise self._too_long("prompt", f"has {n} tokens", n, is_least=True, purpose=" for prompt and answer")

        for part in self._tokens_of_parts(prompt, cancelled):
            if not isinstance(part, Media):
                tokens.append(part)
                continue
            assert self._media
            for piece in self._media.encode(part, check, cancelled, salt=request.cache_salt).pieces:
                if piece.vectors is not None:
                    run = (piece.vectors, piece.is_whole, part.kind, piece.n_positions, piece.positions)
                    runs.append(MediaRun(n_tokens(), *run))
                tokens.append(piece.tokens)
        if runs and runs[-1].stop == n_tokens():
            message = (
                "ends with an image or audio; add text after it, such as a newline, because only text can be continued"
            )
            raise InvalidRequest("prompt", message)
        if not n_tokens() or not (prompt.media or prompt.text):
            raise InvalidRequest("prompt", "is empty; give at least one token")
        return np.concatenate(tokens), tuple(runs)

    def _check_media(self, request: GenerationRequest, prompt: MediaPrompt) -> None:
        """Raises `InvalidRequest` for a prompt that can be refused without decoding it."""
        self._check_modalities(prompt)
        if prompt.media and request.params.scores_prompt:
            message = "requests log-probabilities of a prompt with images or audio, which is not supported"
            raise InvalidRequest("echo", message)

    def _check_modalities(self, prompt: MediaPrompt) -> None:
        self._refuse_long("prompt", prompt.text)
        for medium in prompt.media:
            if medium.kind not in self._info.modalities:
                known = " and ".join(_MODALITIES[kind] for kind in self._info.modalities)
                takes = (
                    f"accepts only text and {known}"
                    if known
                    else f"accepts text only (images require {setting_name('mmproj')})"
                )
                raise InvalidRequest("prompt", f"contains {_MODALITIES[medium.kind]}, but {self._info.name} {takes}")

    def _tokenize(self, text: str, cancelled: IsCancelled) -> npt.NDArray[np.int32]:
        """Caches the tokens of the last long text: `n` choices of one prompt are prepared one after another."""
        if not is_long(text):
            return self._vocab.tokenize(text, add_eos=self._adds_eos, cancelled=cancelled)
        last = self._last_long
        if last is None or last[0] != text:
            ids = self._vocab.tokenize(text, add_eos=self._adds_eos, cancelled=cancelled)
            last = self._last_long = (text, ids)
        return last[1]

    def _refuse_long(self, field: str, prompt: str | list[int] | Pair) -> None:
        """Refuses a prompt or similar field that certainly has too many tokens, without tokenising it."""
        limit = self._info.max_sequence
        if isinstance(prompt, list):
            if len(prompt) > limit:
                raise self._too_long(field, f"has {len(prompt)} tokens", len(prompt))
            return
        texts = [prompt] if isinstance(prompt, str) else [prompt.query, prompt.document]
        n_bytes = sum(len(text) if text.isascii() else len(text.encode(errors="replace")) for text in texts)
        # texts up to 64 KiB are always tokenised, however short the context is
        most = max(1 << 16, limit * self._vocab.longest_piece)
        if n_bytes > most:
            what = f"is {n_bytes:,} bytes long, which is more than {limit} tokens"
            raise self._too_long(field, what, -(-n_bytes // self._vocab.longest_piece), is_least=True)

    def _pair(self, pair: Pair) -> npt.NDArray[np.int32]:
        if self._info.pooling is None:
            raise InvalidRequest("prompt", f"is {pair!r}; it must be a string or a list of token ids")
        if self._info.pooling != "rank":
            message = f"is a pair of texts, which requires a reranker; {self._info.name} embeds one text at a time"
            raise InvalidRequest("prompt", message)
        if template := self._info.rerank_template:
            text = _PLACEHOLDER.sub(lambda found: str(getattr(pair, found[1])), template)
            return self._vocab.tokenize(text, add_special=False)
        return self._vocab.tokenize_pair(pair.query, pair.document)
