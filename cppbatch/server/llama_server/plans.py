"""From llama-server's requests to plans."""

from __future__ import annotations

from typing import Any

from cppbatch.engine.request import TokenPiece
from cppbatch.errors import InvalidRequest
from cppbatch.server.llama_server.replies import LlamaReply
from cppbatch.server.llama_server.schemas import InfillRequest, LlamaCompletionRequest, LlamaFields
from cppbatch.server.llama_server.tokens import infill_tokens, prompts_of, tokens_of
from cppbatch.server.llama_server.translate import translated
from cppbatch.server.response import PreparedRequest
from cppbatch.server.serving import Serving, new_id

_RENAMED = {"max_tokens": "n_predict", "logprobs": "n_probs", "n": "n_cmpl"}


async def prepare_completion(body: LlamaCompletionRequest, serving: Serving) -> PreparedRequest:
    """`/completion`. Raises `InvalidRequest`."""
    prompts, most = prompts_of(body.prompt), serving.limits.max_prompts_per_batch
    if len(prompts) > most:
        raise InvalidRequest(
            "prompt", f"has {len(prompts)} prompts; this server takes {most} (--max-prompts-per-batch)"
        )
    names = [f"prompt[{i}]" for i in range(len(prompts))] if len(prompts) > 1 else ["prompt"]
    return await _plan(
        body, serving, [await tokens_of(serving, prompt, name) for prompt, name in zip(prompts, names, strict=True)]
    )


async def prepare_infill(body: InfillRequest, serving: Serving) -> PreparedRequest:
    """`/infill`. Raises `InvalidRequest`."""
    return await _plan(body, serving, [await infill_tokens(serving, body)])


async def _plan(body: LlamaFields, serving: Serving, prompts: list[list[TokenPiece]]) -> PreparedRequest:
    renames = {ours: theirs for ours, theirs in _RENAMED.items() if getattr(body, theirs) is not None}
    try:
        body = await translated(body, serving)
        serving.limits.check(body)  # its `model` does not matter, as there
        params = body.params(max_tokens=serving.limits.default_tokens(None), **_form(body))
        ids = [[token.id for token in prompt] for prompt in prompts]
        requests = serving.engine_requests(body, new_id("llama-"), ids, params)
    except InvalidRequest as error:
        raise InvalidRequest(renames.get(error.field, error.field), error.message) from error
    return PreparedRequest(
        requests, LlamaReply(body, requests, prompts, serving.info), stream=bool(body.stream), field_names=renames
    )


def _form(body: LlamaFields) -> dict[str, Any]:
    """What the endpoint itself has to ask for: a schema, and the prompt alone where no text is wanted."""
    schema = body.schema()
    form: dict[str, Any] = {} if schema is None else {"json_schema": schema}
    return form | ({"echo": True} if body.n_predict == 0 else {})  # only an echo may be of no tokens
