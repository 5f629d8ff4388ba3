"""From OpenAI's requests to plans: what to generate, and how to tell it. Batch jobs use them too."""

from __future__ import annotations

from cppbatch.chat.chat_format import PreparedChat
from cppbatch.errors import InvalidRequest
from cppbatch.server.openai.replies import ChatReply, CompletionReply
from cppbatch.server.openai.schemas import ChatRequest, CompletionRequest
from cppbatch.server.response import PreparedRequest
from cppbatch.server.serving import Prompt, Serving

COMPLETION_TOKENS = 16
"""OpenAI's default of `max_tokens` for /v1/completions; chat has none of its own."""


async def prepare_completion(
    body: CompletionRequest, serving: Serving, usual_tokens: int | None = COMPLETION_TOKENS
) -> PreparedRequest:
    """`/v1/completions`; `usual_tokens`: for one that names no number. Raises `InvalidRequest`."""
    serving.check(body)
    schema = body.schema()
    form = {} if schema is None else {"json_schema": schema}
    params = body.params(max_tokens=serving.limits.default_tokens(usual_tokens), **form)
    reply = CompletionReply(body, serving.info.name)
    prompts: list[Prompt] = body.prompts()
    if body.suffix:
        prompts = [_filled_in(serving, prompt, body.suffix) for prompt in prompts]
    requests = serving.engine_requests(body, reply.id, prompts, params)
    return PreparedRequest(requests, reply, stream=bool(body.stream))


def _filled_in(serving: Serving, prompt: Prompt, suffix: str) -> str:
    """A prompt for what stands between two texts, in the model's own form."""
    tokens = serving.info.fill_in
    if tokens is None:
        raise InvalidRequest("suffix", f"cannot be used: {serving.info.name} was not trained to fill in")
    if not isinstance(prompt, str):
        raise InvalidRequest("suffix", "needs a prompt that is text, not token ids")
    return f"{tokens.prefix}{prompt}{tokens.suffix}{suffix}{tokens.middle}"


async def next_turn(body: ChatRequest, serving: Serving) -> PreparedChat:
    """What the assistant is to say next. Raises `InvalidRequest`."""
    serving.check_size("messages", body.messages, body.tools)
    return await serving.prepare_chat(
        body.conversation(),
        tools=body.functions(),
        choice=body.choice(),
        schema=body.schema(),
        variables=body.template_variables(),
        continue_final_message=None if body.add_generation_prompt is None else not body.add_generation_prompt,
    )


async def prepare_chat_completion(body: ChatRequest, serving: Serving) -> PreparedRequest:
    """`/v1/chat/completions`. Raises `InvalidRequest`."""
    serving.check(body)
    turn = await next_turn(body, serving)
    params = body.params(max_tokens=serving.limits.default_tokens(None), **turn.params)
    reply = ChatReply(body, serving.info.name, turn)
    requests = serving.engine_requests(body, reply.id, [turn.prompt], params)
    return PreparedRequest(requests, reply, stream=bool(body.stream), field_names=turn.renames)
