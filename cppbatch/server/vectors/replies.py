"""From the engine's vectors to answers."""

from __future__ import annotations

from base64 import b64encode

import numpy as np

from cppbatch.engine.embeddings import Vector, normalised, vector_of
from cppbatch.engine.request import FinishReason, GenerationEvent
from cppbatch.errors import GenerationFailed, InvalidRequest
from cppbatch.server.response import ResponseBuilder, ServerSentEvent
from cppbatch.server.serving import new_id
from cppbatch.server.vectors.schemas import EmbeddingRequest, RerankRequest
from cppbatch.server.vectors.shapes import (
    Embedding,
    EmbeddingAnswer,
    RankedDocument,
    RerankAnswer,
    RerankResult,
    VectorUsage,
)


class VectorReply(ResponseBuilder):
    """Every input has one event, with a vector in it; there is nothing to stream."""

    def __init__(self, prefix: str, model: str, body: EmbeddingRequest | RerankRequest) -> None:
        super().__init__()
        self.id = new_id(prefix)
        self._model = model
        self._times = {name: getattr(body, name) for name in ("timeout", "queue_timeout")}

    def stream_events(self, index: int, event: GenerationEvent) -> list[ServerSentEvent]:
        """As in `ResponseBuilder`."""
        raise NotImplementedError("vectors are not streamed")

    def _vectors(self) -> Vector:
        """float32[n, n_embd], in the inputs' order. When the time was not enough for all, raises `InvalidRequest` if
        the client has set it, else `GenerationFailed`."""
        late = [event.usage for event in self.last_events.values() if event.finish_reason is FinishReason.TIMEOUT]
        if late:
            too_late = f"came before {len(late)} of {len(self.last_events)} vectors were computed"
            took = max(usage.total_seconds for usage in late if usage)
            for name, seconds in self._times.items():
                if seconds is not None and seconds <= took:
                    raise InvalidRequest(name, f"of {seconds:g} s {too_late}; give more time, or fewer inputs")
            raise GenerationFailed(f"the server's --request-timeout {too_late}")
        return np.stack([vector_of(self.last_events[i].embedding or b"") for i in range(len(self.last_events))])

    def _usage(self) -> VectorUsage:
        tokens = self.token_counts().prompt
        return VectorUsage(prompt_tokens=tokens, total_tokens=tokens)


class EmbeddingReply(VectorReply):
    """`/v1/embeddings`."""

    def __init__(self, body: EmbeddingRequest, model: str) -> None:
        super().__init__("embd-", model, body)
        self._body = body

    def build(self, completions: list[list[GenerationEvent]]) -> EmbeddingAnswer:
        """As in `ResponseBuilder`."""
        vectors = normalised(self._vectors(), self._body.dimensions)
        as_text = self._body.encoding_format == "base64"
        data = [
            Embedding(index=index, embedding=_base64(vector) if as_text else vector.tolist())
            for index, vector in enumerate(vectors)
        ]
        return EmbeddingAnswer(data=data, model=self._model, usage=self._usage())


class RerankReply(VectorReply):
    """`/v1/rerank`."""

    def __init__(self, body: RerankRequest, model: str) -> None:
        super().__init__("rerank-", model, body)
        self._body = body

    def build(self, completions: list[list[GenerationEvent]]) -> RerankAnswer:
        """As in `ResponseBuilder`."""
        scores = self._vectors()[:, 0]
        texts = self._body.texts() if self._body.return_documents else None
        results = [
            RerankResult(
                index=int(i),
                relevance_score=float(scores[i]),
                document=RankedDocument(text=texts[i]) if texts else None,
            )
            for i in np.argsort(-scores, kind="stable")[: self._body.top_n]
        ]
        return RerankAnswer(id=self.id, model=self._model, results=results, usage=self._usage())


def _base64(vector: Vector) -> str:
    return b64encode(vector.astype("<f4").tobytes()).decode()
