"""From `/generate` and `/generate/batch` to plans: what to generate, and how to tell it."""

from __future__ import annotations

from cppbatch.engine.params import SamplingParams
from cppbatch.engine.request import GenerationRequest
from cppbatch.errors import InvalidRequest
from cppbatch.server.generate.items import items_of
from cppbatch.server.generate.replies import BatchReply, GenerateReply
from cppbatch.server.generate.schemas import BatchRequest, GenerateFields, GenerateRequest
from cppbatch.server.response import PreparedRequest
from cppbatch.server.serving import Serving, new_id


def prepare_generate(body: GenerateRequest, serving: Serving) -> PreparedRequest:
    """`/generate`. Raises `InvalidRequest`."""
    return PreparedRequest([_request(body, serving, new_id("gen-"))], GenerateReply(), stream=bool(body.stream))


def prepare_batch(body: BatchRequest, serving: Serving) -> PreparedRequest:
    """`/generate/batch`: requests of the items that are good, and a reply that knows of the others.

    Raises `InvalidRequest` for what is wrong with all of them.
    """
    items = items_of(body, serving.limits)
    _checked_params(body, serving)
    reply, name = BatchReply(items), new_id("batch-")
    requests = []
    for i, item in enumerate(items):
        try:
            requests.append(_request(item.body(), serving, f"{name}-{i}"))
        except InvalidRequest as error:
            reply.refuse(i, error)
        else:
            reply.places.append(i)
    return PreparedRequest(requests, reply, stream=bool(body.stream))


def _request(body: GenerateRequest, serving: Serving, name: str) -> GenerationRequest:
    (request,) = serving.engine_requests(body, name, [body.prompt], _checked_params(body, serving))
    return request


def _checked_params(body: GenerateFields, serving: Serving) -> SamplingParams:
    """Its params, when there is nothing else wrong with it. Without `max_tokens` the model ends its text itself."""
    body.check_one_text()
    serving.check(body)
    schema = body.schema()
    form = {} if schema is None else {"json_schema": schema}
    return body.params(max_tokens=serving.limits.default_tokens(None), **form)
