"""The OpenAPI document: what every route takes and gives, from the types that read and write it."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import msgspec

from cppbatch import __version__
from cppbatch.cluster.engine_client import Health
from cppbatch.engine.metrics import EngineStats
from cppbatch.engine.params import INT32_MAX, INTEGER_RANGES, OPTIONAL_INTEGER_RANGES, RANGES
from cppbatch.engine.request import OPTION_RANGES
from cppbatch.server.anthropic.endpoints import ENDPOINTS as ANTHROPIC
from cppbatch.server.batches.endpoints import ENDPOINTS as BATCHES
from cppbatch.server.endpoint import REFS, TEXT, Endpoint, json, ref
from cppbatch.server.files.endpoints import ENDPOINTS as FILES
from cppbatch.server.generate.endpoints import ENDPOINTS as GENERATE
from cppbatch.server.llama_server.endpoints import ENDPOINTS as LLAMA_SERVER
from cppbatch.server.openai.endpoints import ENDPOINTS as OPENAI
from cppbatch.server.responses.endpoints import ENDPOINTS as RESPONSES
from cppbatch.server.sampling_fields import MOST_CHOICES, SamplingFields
from cppbatch.server.shapes import ReadyAnswer, ServerFigures
from cppbatch.server.vectors.endpoints import ENDPOINTS as VECTORS

Json = dict[str, Any]

_STATUS = {
    400: "The request is malformed, or asks for what cannot be; `param` names the field",
    401: "The server wants an API key, and the request has none that it knows",
    404: "There is nothing of this name",
    409: "It cannot be done in the state that things are in",
    413: "The body is larger than the server takes",
    429: "As many requests wait or are answered as may; Retry-After says when to come again",
    500: "The engine could not finish the request",
    503: "The model is still loading, the server is going down, the engine is no more, or no files are kept",
    507: "The disk is full, or cannot be written",
}

_STATS = {"anyOf": [{"allOf": [ref(EngineStats), ref(ServerFigures)]}, ref(ServerFigures)]}

ENDPOINTS = {
    ("get", "/health"): Endpoint(
        "200 when requests are served, 503 with the state when not; needs no API key", json(ref(Health)), (503,),
        unavailable=Health,
    ),
    ("get", "/ready"): Endpoint(
        "200 when a request that comes now is taken, 503 when not; needs no API key", json(ref(ReadyAnswer)), (503,),
        unavailable=ReadyAnswer,
    ),
    ("get", "/stats"): Endpoint(
        "Counters, the last minute, and each worker", json(_STATS), (401, 503), types=(EngineStats, ServerFigures)
    ),
    ("get", "/metrics"): Endpoint("The same for Prometheus", {"text/plain": TEXT}, (401,)),
    ("get", "/openapi.json"): Endpoint("This document", json({"type": "object"}), (401, 503)),
    **OPENAI,
    **RESPONSES,
    **ANTHROPIC,
    **VECTORS,
    **GENERATE,
    **FILES,
    **BATCHES,
    **LLAMA_SERVER,
}  # fmt: skip
"""By method and path, as the routes have them; tests/integration/test_openapi.py compares them."""


@lru_cache(maxsize=1)
def document() -> bytes:
    """The document, as JSON."""
    paths: dict[str, Json] = {}
    for (method, path), endpoint in ENDPOINTS.items():
        paths.setdefault(path, {})[method] = _operation(path, endpoint)
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {
                "title": "cppbatch",
                "version": __version__,
                "description": "OpenAI's and Anthropic's APIs over a GGUF model",
            },
            "paths": paths,
            "components": {
                "schemas": _schemas(),
                "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            },
            "security": [{}, {"key": []}],  # keys are asked for where the server was given some
        }
    )


def _operation(path: str, endpoint: Endpoint) -> Json:
    answers: Json = {"200": {"description": "Success", "content": _content(endpoint.answer)}}
    for status in endpoint.errors:
        kind = endpoint.unavailable if status == 503 else endpoint.error
        answers[str(status)] = {"description": _STATUS[status], "content": _content(json(ref(kind)))}
    operation: Json = {"summary": endpoint.summary, "responses": answers}
    parameters = [{"name": "id", "in": "path", "required": True, "schema": TEXT}] if "{id}" in path else []
    if endpoint.query:
        (fields,) = msgspec.json.schema(endpoint.query)["$defs"].values()
        parameters += [{"name": name, "in": "query", "schema": of} for name, of in fields["properties"].items()]
    if parameters:
        operation["parameters"] = parameters
    if endpoint.form:
        operation["requestBody"] = {"required": True, "content": _content({"multipart/form-data": endpoint.form})}
    if endpoint.body:
        operation["requestBody"] = {"required": True, "content": _content(json(ref(endpoint.body)))}
    return operation


def _content(schemas: dict[str, Json]) -> Json:
    return {kind: {"schema": schema} for kind, schema in schemas.items()}


def _schemas() -> Json:
    """The schemas of all types, with the ranges that `SamplingParams` and `GenerationRequest` check."""
    bodies = [endpoint.body for endpoint in ENDPOINTS.values() if endpoint.body]
    answers = [kind for each in ENDPOINTS.values() for kind in (*each.types, each.unavailable, each.error)]
    _, schemas = msgspec.json.schema_components([*bodies, *answers], ref_template=REFS)
    for body in bodies:
        if issubclass(body, SamplingFields):
            for name, (low, high) in _ranges(body).items():
                _limit(schemas[body.__name__]["properties"][name], low, high)
    return schemas


def _ranges(body: type[SamplingFields]) -> dict[str, tuple[float, float]]:
    """By the names that the client uses."""
    known: dict[str, tuple[float, float]] = {**RANGES, **INTEGER_RANGES, **OPTIONAL_INTEGER_RANGES, **OPTION_RANGES}
    ranges = {name: bounds for name, bounds in known.items() if name in body.__struct_fields__}
    aliases = {alias: known[ours] for ours, alias in body._ALIASES.items() if ours in known}
    lengths = ("max_tokens", "max_completion_tokens", "max_output_tokens")
    tokens = [name for name in lengths if name in body.__struct_fields__]
    return {
        **ranges,
        **aliases,
        **dict.fromkeys(tokens, (0.0, INT32_MAX)),
        **dict.fromkeys(("n", "best_of"), (1.0, MOST_CHOICES)),
    }


def _limit(schema: Json, low: float, high: float) -> None:
    for kind in schema.get("anyOf", [schema]):
        if kind.get("type") != "null":
            kind |= {"minimum": low, "maximum": high}
