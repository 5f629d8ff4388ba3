"""The one place where a request's body becomes the engine's requests."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from cppbatch.engine.collect import expand
from cppbatch.engine.params import SamplingParams, replaced
from cppbatch.engine.request import GenerationRequest
from cppbatch.errors import InvalidRequest
from cppbatch.server.sampling_fields import SamplingFields
from cppbatch.server.serving import Serving

Prompt = str | list[int]

_MOST_SEQUENCES = 1024


def new_id(prefix: str) -> str:
    """An id for an answer, like `cmpl-…`."""
    return f"{prefix}{uuid.uuid4().hex}"


def requests_of(
    serving: Serving, body: SamplingFields, name: str, prompts: Sequence[Prompt], params: SamplingParams
) -> list[GenerationRequest]:
    """A request for each prompt and each of its completions, in that order; their ids begin with `name`.

    Raises `InvalidRequest` when there are too many.
    """
    n = body.n_candidates
    if len(prompts) * n > _MOST_SEQUENCES:
        message = f"asks for {len(prompts)} prompts x {n} completions; one request may have {_MOST_SEQUENCES}"
        raise InvalidRequest("prompt", message)
    options = body.options() | {"timeout": serving.limits.timeout(body.timeout), "fit": not body.names_length}
    each = expand([params], n, ranked=n > body.n_choices)
    requests = []
    for p, prompt in enumerate(prompts):
        first = GenerationRequest(id=f"{name}-{p * n}", prompt=prompt, params=each[0], **options)
        requests += [first, *(replaced(first, id=f"{name}-{p * n + i}", params=each[i]) for i in range(1, n))]
    return requests
