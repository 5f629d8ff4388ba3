"""From Anthropic's requests to plans."""

from __future__ import annotations

from cppbatch.chat.chat_format import PreparedChat
from cppbatch.server.anthropic.conversation import conversation
from cppbatch.server.anthropic.replies import MessageReply
from cppbatch.server.anthropic.schemas import CountTokensRequest, MessagesRequest
from cppbatch.server.response import PreparedRequest
from cppbatch.server.serving import Serving

_FORMAT = "output_config.format"
_NAMES = {"function.parameters": "input_schema", "function.": "", "response_format": _FORMAT}
_RENAMES = {"prompt": "messages", "stop": "stop_sequences"}


async def prepare_message(body: MessagesRequest, serving: Serving) -> PreparedRequest:
    """`/v1/messages`. Raises `InvalidRequest`."""
    serving.check(body)
    turn = await _turn(body, serving)
    params = body.params(**turn.params)
    reply = MessageReply(body.model, turn, body.max_tokens)
    requests = serving.engine_requests(body, reply.id, [turn.prompt], params)
    renames = {ours: _FORMAT if theirs == "response_format" else theirs for ours, theirs in turn.renames.items()}
    if body.schema() is not None:
        renames["json_schema"] = _FORMAT
    return PreparedRequest(requests, reply, stream=bool(body.stream), field_names=_RENAMES | renames)


async def prompt_tokens(body: CountTokensRequest, serving: Serving) -> int:
    """`/v1/messages/count_tokens`: as many as the same `/v1/messages` would have. Raises `InvalidRequest`."""
    serving.check_model(body.model)
    turn = await _turn(body, serving)
    return len(await serving.client.tokenize(turn.prompt))


async def _turn(body: CountTokensRequest, serving: Serving) -> PreparedChat:
    serving.check_size("messages", body.messages, body.tools)
    messages, tools, choice, schema = conversation(body), body.functions(), body.choice(), body.schema()
    variables = body.template_variables()
    return await serving.prepare_chat(
        messages, tools=tools, choice=choice, schema=schema, variables=variables, field_names=_NAMES
    )
