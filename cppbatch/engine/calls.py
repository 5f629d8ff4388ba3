"""What an engine does for a caller who waits for it: whole batches, one stream, vectors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Any

from cppbatch.config import EngineConfig
from cppbatch.engine.collect import collect, collect_vectors, expand, likeliest, n_candidates, params_for_each
from cppbatch.engine.embeddings import Vector, check_dimensions, normalised
from cppbatch.engine.mapping import Mapper
from cppbatch.engine.model_info import ModelInfo
from cppbatch.engine.output_processor import OutputProcessor
from cppbatch.engine.params import SamplingParams
from cppbatch.engine.request import Completion, GenerationEvent, GenerationRequest, Mapped, Prompt
from cppbatch.engine.sequence import Seq
from cppbatch.errors import InvalidRequest


class Calls(ABC):
    """The simple ways to use an engine. `BatchInferenceEngine` has the rest: requests and the step loop."""

    config: EngineConfig
    outputs: OutputProcessor
    _sequences: dict[str, Seq]

    @property
    @abstractmethod
    def info(self) -> ModelInfo:
        """The loaded model."""

    @abstractmethod
    def add(self, sequence: Seq) -> None:
        """Queues a prepared sequence."""

    @abstractmethod
    def cancel(self, request_id: str) -> bool:
        """Ends a request now."""

    @abstractmethod
    def _prepare(
        self, prompt: Prompt, params: SamplingParams | None, request_id: str | None = None, **options: Any
    ) -> Seq: ...

    @abstractmethod
    def _queue(self, sequence: Seq) -> None: ...

    @abstractmethod
    def compute(self) -> None:
        """Computes one batch."""

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        n: int = 1,
        best_of: int | None = None,
        progress: bool = False,
        **options: Any,
    ) -> list[Completion]:
        """Continues every prompt, all in one batch, and returns the results in the prompts' order.

        `params`: one for all, or one for each prompt. `n`: results for each prompt, one after the other; `best_of`:
        so many are made, and the `n` of the highest mean log-probability returned. `progress` shows a line with the
        speed. `options`: fields of `GenerationRequest` (priority, timeout, cache_salt ...) for all. Raises
        `InvalidRequest` naming the prompt at fault before anything runs. Interrupted, it cancels what is left.
        """
        of = n_candidates(n, best_of)
        wanted = expand(params_for_each(prompts, params), of, ranked=of > n)
        ids = self._add_all("prompts", [prompt for prompt in prompts for _ in range(of)], wanted, options, of)
        results = collect(ids, self._run(set(ids)), progress=progress)
        return likeliest(results, n, of) if of > n else results

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Any
    ) -> Generator[GenerationEvent, None, None]:
        """Continues one prompt, yielding its events as they come; other requests advance meanwhile.

        `options`: fields of `GenerationRequest`. Closing the iterator cancels the request.
        """
        return self._stream(self._prepare(prompt, params, **options))

    def _stream(self, sequence: Seq) -> Generator[GenerationEvent, None, None]:
        self.add(sequence)  # not before the iteration starts: an iterator that never ran leaves nothing behind
        yield from self._run({sequence.id})

    def map(
        self,
        prompts: Iterable[Prompt | tuple[Prompt, SamplingParams]],
        params: SamplingParams | None = None,
        *,
        ordered: bool = False,
        **options: Any,
    ) -> Generator[Mapped, None, None]:
        """Continues prompts as they come, yielding each result as soon as it is there.

        `prompts`: any iterable, an endless one too, of prompts, or of pairs with params of their own. It is asked for
        no more than keep the engine busy: those that run, and as many to follow. The engine steps while the next result
        is waited for. `ordered`: results in the prompts' order, for which up to eight times as many as run at once are
        held back; then no more are started before the one that all wait for has ended.

        A prompt that cannot run is a result with an error, and the others go on. `options`: fields of
        `GenerationRequest` (priority, timeout, cache_salt ...) for all. Closing the iterator, or an exception of the
        iterable, cancels what is left. Other requests of this engine advance meanwhile, and their events are kept for
        those who ask. Raises `InvalidRequest` at once for what no prompt could run with; `EngineClosed`.
        """
        if isinstance(prompts, str):
            raise InvalidRequest("prompts", "is one string; give an iterable of them, like [prompt]")
        if self.info.pooling or "task" in options:
            raise InvalidRequest("task", "`map` is for models that generate text; for vectors use `embed`")
        if not isinstance(params, SamplingParams | None):
            raise InvalidRequest("params", f"is {params!r:.200}; give one SamplingParams, or pairs with the prompts")
        GenerationRequest(id="", prompt="", **options)  # raises for options that are bad for all

        def start(prompt: Prompt, its: SamplingParams | None) -> str:
            sequence = self._prepare(prompt, its or params, **options)
            self._queue(sequence)
            return sequence.id

        return Mapper(self, self.outputs, start, prompts, ordered=ordered).results()

    def embed(
        self,
        texts: Sequence[Prompt],
        *,
        normalise: bool = True,
        dimensions: int | None = None,
        progress: bool = False,
        **options: Any,
    ) -> Vector:
        """A vector for each text, in order, float32[n, dimensions]; a reranker's scores for each `Pair` of texts.

        `normalise`: to length 1, but not scores. `dimensions`: see `normalised`. `progress`, `options`: as in
        `generate`. Raises `InvalidRequest` naming the text at fault before anything runs, `GenerationFailed` when one
        of them gets no vector.
        """
        check_dimensions(dimensions, self.info.n_embd)
        ids = self._add_all("texts", texts, params_for_each(texts, None), {**options, "task": "embed"}, 1)
        vectors = collect_vectors(ids, self._run(set(ids)), self.info.n_embd, progress=progress)
        scores = self.info.pooling == "rank"
        return normalised(vectors, dimensions) if normalise and not scores else vectors[:, :dimensions]

    def _add_all(
        self, what: str, prompts: Sequence[Prompt], params: list[SamplingParams], options: dict[str, Any], of: int
    ) -> list[str]:
        prepared = []
        for i, (prompt, its) in enumerate(zip(prompts, params, strict=True)):
            try:
                prepared.append(self._prepare(prompt, its, **options))
            except InvalidRequest as error:
                raise InvalidRequest(f"{what}[{i // of}]", str(error)) from error
        for sequence in prepared:
            self._queue(sequence)  # however many: who waits for them all is this caller alone
        return [sequence.id for sequence in prepared]

    def _run(self, ids: set[str]) -> Iterator[GenerationEvent]:
        """Steps until these requests have ended, yields their events, and keeps others' for those who ask."""
        try:
            while ids:
                self.compute()
                self.outputs.keep()
                # Gone without a word here: somebody else's `step` has taken the last event.
                ids &= {i for i in ids if i in self._sequences or self.outputs.has_kept(i)}
                for request_id in [i for i in ids if self.outputs.has_kept(i)]:
                    for event in self.outputs.take_request(request_id):
                        if event.finish_reason:
                            ids.discard(request_id)
                        yield event
        finally:
            for request_id in ids:
                self.cancel(request_id)
            self.outputs.drop(ids)
