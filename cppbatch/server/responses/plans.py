"""From requests for a response to plans."""

from __future__ import annotations

from cppbatch.server.response import PreparedRequest
from cppbatch.server.responses.conversation import conversation
from cppbatch.server.responses.replies import ResponseReply
from cppbatch.server.responses.schemas import ResponsesRequest
from cppbatch.server.serving import Serving

_FORMAT = "text.format"
_NAMES = {"function.": "", "messages": "input", "response_format": _FORMAT}
_RENAMES = {"prompt": "input", "max_tokens": "max_output_tokens"}


async def prepare_response(body: ResponsesRequest, serving: Serving) -> PreparedRequest:
    """`/v1/responses`. Raises `InvalidRequest`."""
    serving.check(body)
    body.check_stateless()
    serving.check_size("input", body.input if isinstance(body.input, list) else [], body.tools)
    messages, tools, choice, schema = conversation(body), body.functions(), body.choice(), body.schema()
    variables = body.template_variables()
    turn = await serving.prepare_chat(
        messages, tools=tools, choice=choice, schema=schema, variables=variables, field_names=_NAMES
    )
    params = body.params(max_tokens=serving.limits.default_tokens(None), **turn.params)
    reply = ResponseReply(body, body.model or serving.info.name, turn, params)
    requests = serving.engine_requests(body, reply.id, [turn.prompt], params)
    renames = {ours: _FORMAT if theirs == "response_format" else theirs for ours, theirs in turn.renames.items()}
    if schema is not None:
        renames["json_schema"] = _FORMAT
    return PreparedRequest(requests, reply, stream=bool(body.stream), field_names=_RENAMES | renames)
