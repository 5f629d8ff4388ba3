"""What `/v1/embeddings` and `/v1/rerank` share: request fields, engine requests, and reading the engine's vectors."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from cppbatch.engine.embeddings import Vector, vector_of
from cppbatch.engine.request import FinishReason, GenerationEvent, GenerationRequest, Prompt
from cppbatch.errors import GenerationFailed, InvalidRequest
from cppbatch.server.response import ResponseBuilder, ServerSentEvent
from cppbatch.server.serving import Serving, new_id

_MAX_INPUTS = 2048  # OpenAI's limit


class PoolingFields(msgspec.Struct, kw_only=True):
    """The common fields of the requests. None: not given."""

    model: str | None = None
    priority: int | None = None
    timeout: float | None = None
    queue_timeout: float | None = None
    user: str | None = None
    """Not used."""


class PoolingUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int


class PoolingBuilder(ResponseBuilder):
    """Builds a response from one vector for each input. It cannot be streamed."""

    def __init__(self, id_prefix: str, model: str, body: PoolingFields) -> None:
        super().__init__()
        self.id = new_id(id_prefix)
        self.model = model
        self._timeouts = {"timeout": body.timeout, "queue_timeout": body.queue_timeout}

    def stream_events(self, index: int, event: GenerationEvent) -> list[ServerSentEvent]:
        """As in `ResponseBuilder`."""
        raise NotImplementedError("embeddings cannot be streamed")

    def vectors(self) -> Vector:
        """float32[n_inputs, n_embd], in the order of the inputs. Raises as `rows`."""
        return np.stack(self.rows())

    def rows(self) -> list[Vector]:
        """What the engine computed for each input: float32[n_embd], with pooling none float32[n_tokens * n_embd].

        If some inputs timed out, raises `InvalidRequest` when the client set the timeout, otherwise `GenerationFailed`.
        """
        late = [event.usage for event in self.last_events.values() if event.finish_reason is FinishReason.TIMEOUT]
        if late:
            passed = f"expired before {len(late)} of {len(self.last_events)} vectors were computed"
            longest = max(usage.total_seconds for usage in late if usage)
            for name, seconds in self._timeouts.items():
                if seconds is not None and seconds <= longest:
                    raise InvalidRequest(name, f"of {seconds:g} s {passed}; increase it, or send fewer inputs")
            raise GenerationFailed(f"the server's --request-timeout {passed}")
        return [vector_of(self.last_events[i].embedding or b"") for i in range(len(self.last_events))]

    def usage(self) -> PoolingUsage:
        """The usage of the whole request."""
        tokens = self.token_counts().prompt
        return PoolingUsage(prompt_tokens=tokens, total_tokens=tokens)


def check_count(field: str, n: int) -> None:
    """Raises `InvalidRequest` for more inputs than a request may have."""
    if n > _MAX_INPUTS:
        raise InvalidRequest(field, f"has {n} entries; the limit per request is {_MAX_INPUTS}")


def pooling_requests(
    body: PoolingFields, serving: Serving, name: str, prompts: Sequence[Prompt]
) -> list[GenerationRequest]:
    """An engine request for each input. Their ids begin with `name`. Raises `InvalidRequest`."""
    serving.check_model(body.model)
    timeout = serving.limits.timeout(body.timeout)
    return [
        GenerationRequest(
            id=f"{name}-{i}",
            prompt=prompt,
            task="embed",
            priority=body.priority or 0,
            timeout=timeout,
            queue_timeout=body.queue_timeout,
            lora=serving.lora,
        )
        for i, prompt in enumerate(prompts)
    ]
