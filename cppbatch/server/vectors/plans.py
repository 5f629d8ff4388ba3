"""From embedding and rerank requests to plans."""

from __future__ import annotations

from collections.abc import Sequence

from cppbatch.engine.embeddings import check_dimensions
from cppbatch.engine.request import GenerationRequest, Pair, Prompt
from cppbatch.errors import InvalidRequest
from cppbatch.server.response import PreparedRequest
from cppbatch.server.serving import Serving
from cppbatch.server.vectors.replies import EmbeddingReply, RerankReply, VectorReply
from cppbatch.server.vectors.schemas import EmbeddingRequest, RerankRequest


async def prepare_embeddings(body: EmbeddingRequest, serving: Serving) -> PreparedRequest:
    """`/v1/embeddings`. Raises `InvalidRequest`."""
    info = serving.info
    if info.pooling == "rank":
        raise InvalidRequest("model", f"{info.name} is a reranker and has no embeddings; use /v1/rerank")
    if info.pooling is not None:
        check_dimensions(body.dimensions, info.n_embd)
    return _plan(body, serving, body.inputs(), EmbeddingReply(body, info.name), {"prompt": "input"})


async def prepare_rerank(body: RerankRequest, serving: Serving) -> PreparedRequest:
    """`/v1/rerank`. Raises `InvalidRequest`."""
    info = serving.info
    if info.pooling != "rank":
        raise InvalidRequest("model", f"{info.name} is no reranker; start the server with one to rank documents")
    pairs = [Pair(body.query, text) for text in body.texts()]
    return _plan(body, serving, pairs, RerankReply(body, info.name), {"prompt": "documents"})


def _plan(
    body: EmbeddingRequest | RerankRequest,
    serving: Serving,
    prompts: Sequence[Prompt],
    reply: VectorReply,
    renames: dict[str, str],
) -> PreparedRequest:
    serving.check_model(body.model)
    timeout = serving.limits.timeout(body.timeout)
    requests = [
        GenerationRequest(
            id=f"{reply.id}-{i}",
            prompt=prompt,
            task="embed",
            priority=body.priority or 0,
            timeout=timeout,
            queue_timeout=body.queue_timeout,
        )
        for i, prompt in enumerate(prompts)
    ]
    return PreparedRequest(requests, reply, field_names=renames)
