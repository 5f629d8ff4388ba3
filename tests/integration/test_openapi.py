"""The OpenAPI document: of every route, of the ranges that are checked, and of what the server really answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import schemathesis
from aiohttp import hdrs
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from cppbatch.engine.params import RANGES, SamplingParams
from cppbatch.errors import InvalidRequest
from cppbatch.server.app import create_app
from cppbatch.server.limits import Limits
from cppbatch.server.openai.schemas import ChatRequest, CompletionRequest
from cppbatch.server.openapi import document
from cppbatch.server.responses.schemas import ResponsesRequest
from cppbatch.server.settings import ServerSettings
from cppbatch.server.storage import open_storage
from tests.app_thread import AppThread

Json = dict[str, Any]

DOCUMENT: Json = msgspec.json.decode(document())
SAME_HANDLERS = ["/completions", "/chat/completions", "/models", "/v1/health"]  # as of routes that are tried out
SCHEMA = schemathesis.openapi.from_dict(DOCUMENT).exclude(path=SAME_HANDLERS)
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
TOOLS = ("tools", "functions", "tool_choice", "response_format")
MANY = 300  # examples of each route: some 16,000 in both long tests
SLOWEST = 15.0  # seconds of an answer: 10 for a grammar that is too complex, and some for what runs beside it
STORED = ("previous_response_id", "conversation", "background")
EXAMPLES = {
    "deadline": None,
    "derandomize": True,
    "database": None,
    "suppress_health_check": list(HealthCheck),
}


@pytest.fixture(scope="module")
def server(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AppThread]:
    settings, data = ServerSettings(limits=Limits(max_tokens=8, max_n=4)), tmp_path_factory.mktemp("data")
    engine = {"model": tiny_llama, "n_ctx": 2048, "n_parallel": 8, "n_threads": 1}
    app = AppThread(engine, lambda client: create_app(client, settings, open_storage(data)))
    yield app
    app.stop()


def schema_of(kind: type) -> Json:
    properties: Json = DOCUMENT["components"]["schemas"][kind.__name__]["properties"]
    return properties


def test_every_route_is_in_the_document_and_the_other_way_round() -> None:
    app = create_app(object())  # type: ignore[arg-type]
    routes = {
        (route.method.lower(), route.resource.canonical)
        for route in app.router.routes()
        if route.resource and route.method not in (hdrs.METH_HEAD, hdrs.METH_OPTIONS)
    }
    assert routes == {(method, path) for path, methods in DOCUMENT["paths"].items() for method in methods}


@pytest.mark.parametrize("name", RANGES)
@pytest.mark.parametrize("kind", [CompletionRequest, ChatRequest])
def test_the_document_has_the_ranges_that_are_checked(name: str, kind: type) -> None:
    (number,) = (each for each in schema_of(kind)[name]["anyOf"] if each["type"] != "null")
    for bound, outside in ((number["minimum"], -0.001), (number["maximum"], 0.001)):
        assert getattr(SamplingParams(**{name: bound}), name) == bound
        with pytest.raises(InvalidRequest, match=name):
            SamplingParams(**{name: bound + outside})


def test_names_that_others_use_have_the_ranges_too() -> None:
    assert schema_of(ChatRequest)["top_logprobs"]["anyOf"][0]["maximum"] == 20
    assert schema_of(ChatRequest)["logprobs"]["anyOf"][0] == {"type": "boolean"}
    assert schema_of(ResponsesRequest)["top_logprobs"]["anyOf"][0]["maximum"] == 20
    assert schema_of(ResponsesRequest)["max_output_tokens"]["anyOf"][0]["maximum"] == 2**31 - 1
    assert schema_of(CompletionRequest)["logprobs"]["anyOf"][0]["maximum"] == 20
    assert schema_of(CompletionRequest)["repeat_penalty"] == schema_of(CompletionRequest)["repetition_penalty"]
    assert schema_of(CompletionRequest)["priority"]["anyOf"][0] == {"type": "integer", "minimum": -100, "maximum": 100}


def test_the_document_is_served(server: AppThread) -> None:
    assert schemathesis.openapi.from_url(f"{server.url}/openapi.json").raw_schema == DOCUMENT


# Bodies of any kind for those that compute are behind the soak marker: `test_mutated_requests` has thousands of them.
@SCHEMA.exclude(method="POST", path_regex="embeddings|rerank|generate|complet|responses|messages|infill").parametrize()
@settings(max_examples=2, **EXAMPLES)
def test_answers_are_as_documented(case: schemathesis.Case, server: AppThread) -> None:
    check(case, server)


@SCHEMA.include(method="POST").parametrize()
@settings(max_examples=2, **EXAMPLES)
def test_answers_to_a_good_prompt_with_any_options_are_as_documented(
    case: schemathesis.Case, server: AppThread
) -> None:
    tame(case)
    check(case, server)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@SCHEMA.parametrize()
@settings(max_examples=MANY, **EXAMPLES)
def test_answers_are_as_documented_for_long(case: schemathesis.Case, server: AppThread) -> None:
    assert check(case, server) < SLOWEST


@pytest.mark.soak
@pytest.mark.timeout(3600)
@SCHEMA.include(method="POST").parametrize()
@settings(max_examples=MANY, **EXAMPLES)
def test_answers_to_a_good_prompt_with_any_options_are_as_documented_for_long(
    case: schemathesis.Case, server: AppThread
) -> None:
    tame(case)
    assert check(case, server) < SLOWEST


def tame(case: schemathesis.Case) -> None:
    """Gives a request what it needs to get as far as the engine; what else it asks for stays."""
    if not isinstance(case.body, dict) or case.media_type == "multipart/form-data":
        return
    case.body |= {"prompt": "abc", "input": "abc", "messages": [{"role": "user", "content": "abc"}], "max_tokens": 4}
    case.body |= {"params": [{}, {"temperature": 0}]}  # of /generate/batch
    if case.path == "/v1/responses":
        case.body.pop("prompt")
    others = ("max_completion_tokens", "max_output_tokens", "n_predict", "suffix", "prompts", "functions")
    for name in ("model", "n", "best_of", *others, *TOOLS, *STORED):
        case.body.pop(name, None)
    if case.path.startswith("/v1/messages"):
        case.body["model"] = "tiny-llama"


def check(case: schemathesis.Case, server: AppThread) -> float:
    """Raises for what is wrong with the answer; the seconds that it took."""
    return float(case.call_and_validate(base_url=server.url, checks=CHECKS, timeout=30).elapsed)
