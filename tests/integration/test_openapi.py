"""The OpenAPI document: every route, the ranges that are checked, and the server's actual answers."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.generation.feedback import FeedbackSources
from schemathesis.pytest._test_builder import build_operation_test
from schemathesis.schemas import BaseSchema
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from cppbatch.server.api.batches.handler import URLS
from cppbatch.server.app import create_app
from cppbatch.server.http.limits import Limits
from cppbatch.server.settings import ServerSettings
from cppbatch.server.storage import open_storage
from tests.support.app_thread import AppThread
from tests.support.sane_figures import assert_sane
from tests.unit.test_openapi import DOCUMENT

Case: TypeAlias = "schemathesis.Case[Any]"

Json = dict[str, Any]

SAME_HANDLERS = [
    path
    for path, operations in DOCUMENT["paths"].items()
    if path == "/embedding" or any(each["summary"].startswith("Same as ") for each in operations.values())
]
"""Routes with the handlers of others that are tried out."""

ENDLESS = ["/live", "/models/sse"]
"""Streams without an end: `test_live.py` and `test_many_models.py` read them."""

SAME_FIELDS = [
    "/v1/completions", "/generate", "/generate/batch", "/infill", "/apply-template", "/v1/messages/count_tokens",
    "/v1/chat/completions/input_tokens", "/v1/responses/input_tokens",
]  # fmt: skip
"""Routes whose requests have the fields of others, some 400 values each: they are tried out every night, as are all
fields of the other routes that an earlier one has."""

GOOD: Json = {
    "prompt": "abc", "input": "abc", "messages": [{"role": "user", "content": "abc"}], "max_tokens": 4,
    "params": [{}, {"temperature": 0}],  # of /generate/batch
}  # fmt: skip
"""What a request needs to get as far as the engine."""

LEFT_OUT = (
    "model", "n", "best_of", "max_completion_tokens", "max_output_tokens", "n_predict", "suffix", "prompts",
    "functions", "tools", "tool_choice", "response_format", "previous_response_id", "conversation", "background",
)  # fmt: skip


def without_given_fields(document: Json) -> Json:
    """The document without the fields of requests that `tame` replaces: to make them up would take most of the time."""
    document = copy.deepcopy(document)
    for _, schema in requests(document):
        for field in (*GOOD, *LEFT_OUT):
            schema["properties"].pop(field, None)
        schema["required"] = [field for field in schema.get("required", []) if field in schema["properties"]]
    return document


def without_fields_of_earlier_routes(document: Json) -> Json:
    """The document with each optional field in the requests of the first route that has it."""
    document = copy.deepcopy(document)
    seen: list[tuple[str, Json]] = []
    for path, schema in requests(document):
        if path in (*SAME_HANDLERS, *SAME_FIELDS):
            continue
        for name, its in list(schema["properties"].items()):
            field = name, {key: value for key, value in its.items() if key != "description"}
            if field not in seen:
                seen.append(field)
            elif name not in schema.get("required", []):
                del schema["properties"][name]
    return document


def requests(document: Json) -> Iterator[tuple[str, Json]]:
    """The schemas of the objects that routes are sent, with the first route of each."""
    schemas: dict[str, str] = {}
    for path, operations in document["paths"].items():
        for content in operations.get("post", {}).get("requestBody", {}).get("content", {}).values():
            schemas.setdefault(content["schema"].get("$ref", "").rpartition("/")[2], path)
    for name, path in schemas.items():
        if (schema := document["components"]["schemas"].get(name)) and "properties" in schema:
            yield path, schema


def schema_of(document: Json) -> BaseSchema:
    return schemathesis.openapi.from_dict(document).exclude(path=[*SAME_HANDLERS, *ENDLESS])


def valid(document: Json) -> BaseSchema:
    schema = schema_of(document)
    schema.config.generation.update(modes=[GenerationMode("positive")])
    return schema


OPERATIONS = [
    (method.upper(), path)
    for path, operations in DOCUMENT["paths"].items()
    for method in operations
    if path not in (*SAME_HANDLERS, *ENDLESS)
]


@pytest.fixture(scope="module")
def any_requests() -> BaseSchema:
    return schema_of(DOCUMENT)


@pytest.fixture(scope="module")
def valid_requests() -> BaseSchema:
    return valid(without_given_fields(DOCUMENT))


@pytest.fixture(scope="module")
def each_field_once() -> BaseSchema:
    return valid(without_fields_of_earlier_routes(without_given_fields(DOCUMENT)))


CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]

EXAMPLES: dict[str, Any] = {
    "deadline": None,
    "derandomize": True,
    "database": None,
    "suppress_health_check": list(HealthCheck),
}


@pytest.fixture(scope="module")
def server(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AppThread]:
    data, slots = tmp_path_factory.mktemp("data"), tmp_path_factory.mktemp("slots")
    settings = ServerSettings(props=True, slot_save_path=slots, limits=Limits(max_tokens=8, max_n=4))
    engine = {"model": tiny_llama, "n_ctx": 2048, "n_parallel": 8, "n_threads": 1}
    app = AppThread(engine, lambda client: create_app(client, settings, open_storage(data, URLS)))
    try:
        yield app
        assert_sane(app.url)  # after all that the tests of this module have sent
    finally:
        app.stop()


def test_the_document_is_served(server: AppThread) -> None:
    assert schemathesis.openapi.from_url(f"{server.url}/openapi.json").raw_schema == DOCUMENT


def try_out(schema: BaseSchema, operation: tuple[str, str], server: AppThread, test: Callable[..., object]) -> None:
    """Sends the requests that a schema's own `parametrize` makes up for an operation. It makes them up while pytest
    collects, which takes 11 seconds of each process."""
    method, path = operation

    @settings(max_examples=2, **EXAMPLES)
    def send(case: Case, server: AppThread) -> None:
        test(case, server)

    build_operation_test(
        config=schema.config,
        operation=schema[path][method],
        test_func=send,
        given_kwargs={},
        feedback=FeedbackSources(),
    )(server=server)


def each(operations: list[tuple[str, str]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("operation", operations, ids=" ".join)


COMPUTING = re.compile("embeddings|rerank|generate|complet|responses|messages|infill|template")
POSTS = [(method, path) for method, path in OPERATIONS if method == "POST"]


# Those that compute get bodies of any kind in `test_openapi_for_long` and, by the thousand, in `test_mutated_requests`.
@each([its for its in OPERATIONS if its not in POSTS or not COMPUTING.search(its[1])])
def test_answers_are_as_documented(any_requests: BaseSchema, operation: tuple[str, str], server: AppThread) -> None:
    try_out(any_requests, operation, server, check)


# Each value that an option may have, with its bounds: 400 requests for 90 fields. The long test has wrong ones too.
@each([its for its in POSTS if its[1] not in SAME_FIELDS])
def test_answers_to_a_good_prompt_with_any_options_are_as_documented(
    each_field_once: BaseSchema, operation: tuple[str, str], server: AppThread
) -> None:
    try_out(each_field_once, operation, server, check_tame)


@pytest.mark.nightly
@each(POSTS)
def test_answers_of_each_route_to_any_of_its_options_are_as_documented(
    valid_requests: BaseSchema, operation: tuple[str, str], server: AppThread
) -> None:
    try_out(valid_requests, operation, server, check_tame)


def tame(case: Case) -> None:
    """Completes a request so that it reaches the engine; its other fields are kept."""
    if not isinstance(case.body, dict) or case.media_type == "multipart/form-data":
        return
    case.body |= GOOD
    if case.path == "/v1/responses":
        case.body.pop("prompt")
    for name in LEFT_OUT:
        case.body.pop(name, None)
    if case.path.startswith("/v1/messages"):
        case.body["model"] = "tiny-llama"


def check_tame(case: Case, server: AppThread) -> None:
    tame(case)
    check(case, server)


def check(case: Case, server: AppThread) -> float:
    """Raises if the answer is wrong; returns the seconds that it took."""
    return float(case.call_and_validate(base_url=server.url, checks=CHECKS, timeout=30).elapsed)
