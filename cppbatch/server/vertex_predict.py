"""Vertex AI's predictions: one request with several requests in it, as its containers get them."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from aiohttp import web

from cppbatch.errors import InvalidRequest
from cppbatch.jobs.job_request import JobRequest
from cppbatch.server.api_errors import json_response
from cppbatch.server.batches.batch_handler import URLS, BatchRequestHandler
from cppbatch.server.keys import KEY
from cppbatch.server.parse import read_json
from cppbatch.server.served_models import MODELS

_FORMAT = "@requestFormat"


class PredictRequest(msgspec.Struct, kw_only=True):
    """The body of a prediction."""

    instances: list[dict[str, Any]]
    """The body of a request each, with its endpoint in `@requestFormat`: `/v1/chat/completions` or
    `chatCompletions`."""


async def predict(request: web.Request) -> web.Response:
    """The answers to the instances, in their order: that of one which cannot be answered is an error."""
    body = await read_json(request, PredictRequest)
    models = request.app[MODELS]
    limit = models.settings.limits.max_prompts_per_batch
    if len(body.instances) > limit:
        raise InvalidRequest("instances", f"has {len(body.instances)} requests; the limit is {limit}")
    requests = [_job_request(i, instance) for i, instance in enumerate(body.instances)]
    responses = await asyncio.gather(*map(BatchRequestHandler(models, rules=request.get(KEY)), requests))
    return json_response({"predictions": [response.body for response in responses]})


def _job_request(i: int, instance: dict[str, Any]) -> JobRequest:
    asked = instance.get(_FORMAT)
    url = asked if asked in URLS else _URLS_BY_FORMAT.get(str(asked))
    if url is None:
        names = ", ".join(_URLS_BY_FORMAT)
        raise InvalidRequest(f"instances[{i}].{_FORMAT}", f"is {asked!r}; it must be one of {names}")
    body = {name: value for name, value in instance.items() if name != _FORMAT}
    return JobRequest(line=i + 1, custom_id=str(i), url=url, body=body, content_hash=0)


def _format(url: str) -> str:
    """Its name as Vertex AI's clients write it: chatCompletions for /v1/chat/completions."""
    first, *others = url.removeprefix("/v1/").split("/")
    return first + "".join(other.title() for other in others)


_URLS_BY_FORMAT = {_format(url): url for url in URLS}
