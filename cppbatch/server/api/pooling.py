"""What `POST /v1/embeddings` and `POST /v1/rerank` share: request fields, engine requests, reading vectors."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from cppbatch.engine.embeddings import Vector, vector_of
from cppbatch.engine.request import FinishReason, GenerationEvent, GenerationRequest
from cppbatch.engine.request import Prompt as AnyPrompt
from cppbatch.errors import GenerationFailed, InvalidRequest
from cppbatch.server.answer.response import ResponseBuilder
from cppbatch.server.http.event_stream import ServerSentEvent
from cppbatch.server.models.serving import ResolvedRequest, Serving, new_id
from cppbatch.server.run_requests import prompt_name

_MAX_INPUTS = 2048  # OpenAI's limit


class PoolingFields(msgspec.Struct, kw_only=True):
    """The common request fields. None: not given."""

    model: str | None = None
    priority: int | None = None
    timeout: float | None = None
    queue_timeout: float | None = None
    user: str | None = None
    """Not used."""


class PoolingUsage(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int


class PoolingBuilder(ResponseBuilder):
    """Builds a response from one vector for each input. It cannot be streamed."""

    def __init__(self, resolved: ResolvedRequest, model: str, body: PoolingFields) -> None:
        super().__init__(resolved)
        self.id, self.model = resolved.id, model
        self._timeouts = {"timeout": body.timeout, "queue_timeout": body.queue_timeout}

    def stream_events(self, index: int, event: GenerationEvent) -> list[ServerSentEvent]:
        """Raises `NotImplementedError`: vectors cannot be streamed."""
        raise NotImplementedError("embeddings cannot be streamed")

    def vectors(self) -> Vector:
        """float32[n_inputs, n_embd], in the order of the inputs. Raises as `rows`."""
        return np.stack(self.rows())

    def rows(self) -> list[Vector]:
        """The engine's result for each input: float32[n_embd], or with pooling none float32[n_tokens * n_embd].

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
    """Raises `InvalidRequest` for more inputs than the limit per request."""
    if n > _MAX_INPUTS:
        raise InvalidRequest(field, f"has {n} entries; the limit per request is {_MAX_INPUTS}; send fewer inputs")


def pooling_requests(
    body: PoolingFields, serving: Serving, id_prefix: str, prompts: Sequence[AnyPrompt], field: str
) -> ResolvedRequest:
    """An engine request for each input. Raises `InvalidRequest`, which names `field`."""
    name = new_id(id_prefix)
    serving.check_model(body.model)
    timeout = serving.limits.timeout(body.timeout)
    requests = []
    for i, prompt in enumerate(prompts):
        with prompt_name(i, len(prompts), field):
            request = GenerationRequest(
                id=f"{name}-{i}",
                prompt=prompt,
                task="embed",
                priority=body.priority or 0,
                timeout=timeout,
                queue_timeout=body.queue_timeout,
                lora=serving.lora,
            )
        requests.append(request)
    return ResolvedRequest(name, requests, {"prompt": field})
