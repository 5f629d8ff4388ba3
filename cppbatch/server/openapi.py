"""The OpenAPI document: requests and responses of every route, derived from the types that decode and encode them."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import msgspec
from aiohttp import web

from cppbatch import __version__
from cppbatch.engine.params import RANGES, UNLIMITED
from cppbatch.engine.request import OPTION_RANGES
from cppbatch.server import web_page
from cppbatch.server.api import embeddings, file_texts, hub, input_tokens, live_endpoint, rerank, status
from cppbatch.server.api.anthropic import messages
from cppbatch.server.api.batches import endpoints as batch_endpoints
from cppbatch.server.api.generate import generate_batch, generate_endpoint, running_batches
from cppbatch.server.api.llama_server import completion as llama_completion
from cppbatch.server.api.llama_server import embeddings as llama_embeddings
from cppbatch.server.api.llama_server import model_routes, slot_files
from cppbatch.server.api.llama_server import status as llama_status
from cppbatch.server.api.llama_server import tokenize as llama_tokenize
from cppbatch.server.api.ollama import chat as ollama_chat
from cppbatch.server.api.ollama import embed as ollama_embed
from cppbatch.server.api.ollama import generate as ollama_generate
from cppbatch.server.api.ollama import manage as ollama_manage
from cppbatch.server.api.ollama import models as ollama_models
from cppbatch.server.api.openai import chat_completions, completions, models_endpoint
from cppbatch.server.api.responses import create_response
from cppbatch.server.fields.sampling import SamplingFields
from cppbatch.server.http.endpoint import REFS, TEXT, Endpoint, Routes, json_content, schema_ref
from cppbatch.server.http.limits import MAX_CHOICES
from cppbatch.setting import INT32_MAX

Json = dict[str, Any]

_STATUS = {
    400: "The request is malformed or cannot be fulfilled; `param` names the field",
    401: "Missing or invalid API key",
    403: "The API key does not allow the model or an adapter, or the Host or Origin header is not allowed",
    404: "Not found",
    409: "The request conflicts with the current state",
    413: "The body is larger than the server allows",
    415: "The request comes from a browser, but its body is not JSON",
    416: "The Range header starts beyond the end of the file",
    429: "The queue is full, too many requests are in progress, or the rate limit of the API key is reached; see "
    "Retry-After",
    500: "The engine failed to complete the request",
    501: "This route is disabled",
    503: "The model is still loading, the server is shutting down, the engine has failed, or file storage is "
    "unavailable",
    507: "The disk is full or not writable",
}

routes = Routes()


@routes.get("/openapi.json", json_content({"type": "object"}))
async def openapi(_request: web.Request) -> web.Response:
    """This document."""
    return web.Response(body=document(), content_type="application/json")


ROUTES = (
    web_page.routes,
    status.routes,
    live_endpoint.routes,
    routes,
    models_endpoint.routes,
    hub.routes,
    completions.routes,
    chat_completions.routes,
    create_response.routes,
    input_tokens.routes,
    file_texts.routes,
    messages.routes,
    embeddings.routes,
    rerank.routes,
    generate_endpoint.routes,
    generate_batch.routes,
    running_batches.routes,
    batch_endpoints.routes,
    llama_completion.routes,
    llama_tokenize.routes,
    llama_embeddings.routes,
    llama_status.routes,
    slot_files.routes,
    model_routes.routes,
    ollama_chat.routes,
    ollama_generate.routes,
    ollama_embed.routes,
    ollama_models.routes,
    ollama_manage.routes,
)
"""The routes of all modules, in the order of the document."""
_ENDPOINTS = {(route.method, route.shown_path): route.endpoint for routes in ROUTES for route in routes}


@lru_cache(maxsize=1)
def document() -> bytes:
    """The document, as JSON."""
    paths: dict[str, Json] = {}
    for (method, path), endpoint in _ENDPOINTS.items():
        paths.setdefault(path, {})[method] = _operation(path, endpoint)
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {
                "title": "cppbatch",
                "version": __version__,
                "description": "OpenAI-compatible, Anthropic-compatible and Ollama-compatible APIs for GGUF models",
            },
            "paths": paths,
            "components": {
                "schemas": _schemas(),
                "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            },
            "security": [{}, {"key": []}],  # optional: a server without API keys requires none
        }
    )


def _operation(path: str, endpoint: Endpoint) -> Json:
    responses: Json = {"200": {"description": "Success", "content": _content(endpoint.content)}}
    of_pages = {403, 415} if endpoint.body else {403}
    for code in sorted(of_pages.union(endpoint.errors)):
        kind = endpoint.unavailable if code == 503 else endpoint.error
        responses[str(code)] = {"description": _STATUS[code], "content": _content(json_content(schema_ref(kind)))}
    operation: Json = {"summary": endpoint.summary, "responses": responses}
    names = re.findall(r"{(\w+)}", path)
    parameters = [{"name": name, "in": "path", "required": True, "schema": TEXT} for name in names]
    if endpoint.query:
        (fields,) = msgspec.json.schema(endpoint.query)["$defs"].values()
        parameters += [{"name": name, "in": "query", "schema": of} for name, of in fields["properties"].items()]
    if parameters:
        operation["parameters"] = parameters
    if endpoint.form:
        operation["requestBody"] = {"required": True, "content": _content({"multipart/form-data": endpoint.form})}
    if endpoint.body:
        body = schema_ref(endpoint.body)
        schema = {"type": "array", "items": body} if endpoint.takes_list else body
        operation["requestBody"] = {"required": True, "content": _content(json_content(schema))}
    return operation


def _content(schemas: dict[str, Json]) -> Json:
    return {media_type: {"schema": schema} for media_type, schema in schemas.items()}


def _schemas() -> Json:
    """The schemas of all types, with the ranges validated by `SamplingParams` and `GenerationRequest`."""
    bodies = [endpoint.body for endpoint in _ENDPOINTS.values() if endpoint.body]
    responses = [kind for each in _ENDPOINTS.values() for kind in (*each.types, each.unavailable, each.error)]
    _, schemas = msgspec.json.schema_components([*bodies, *responses], ref_template=REFS)
    _, request_schemas = msgspec.json.schema_components(bodies, ref_template=REFS)
    for name in schemas.keys() - request_schemas.keys():
        _require_defaults(schemas[name])
    for body in bodies:
        if issubclass(body, SamplingFields):
            for name, (low, high) in _ranges(body).items():
                _limit(schemas[body.__name__]["properties"][name], low, high)
    return schemas


def _require_defaults(schema: Json) -> None:
    """Marks fields with defaults as required: responses always have them. A field that can be absent has no default."""
    required = schema.get("required", [])
    properties = schema.get("properties", {})
    if required := [name for name, of in properties.items() if name in required or "default" in of]:
        schema["required"] = required


def _ranges(body: type[SamplingFields]) -> dict[str, tuple[float, float]]:
    """The range of each numeric field, by the client's name of the field."""
    known: dict[str, tuple[float, float]] = {**RANGES, **OPTION_RANGES}
    ranges = {name: bounds for name, bounds in known.items() if name in body.__struct_fields__}
    aliases = {alias: known[ours] for ours, alias in body._ALIASES.items() if ours in known}
    lengths = ("max_tokens", "max_completion_tokens", "max_output_tokens")
    tokens = [name for name in lengths if name in body.__struct_fields__]
    return {
        **ranges,
        **aliases,
        "top_k": (-1, INT32_MAX),
        **dict.fromkeys(tokens, (UNLIMITED, INT32_MAX)),
        **dict.fromkeys(("n", "best_of"), (1.0, MAX_CHOICES)),
    }


def _limit(schema: Json, low: float, high: float) -> None:
    for kind in schema.get("anyOf", [schema]):
        if kind.get("type") != "null":
            kind |= {"minimum": low, "maximum": high}
