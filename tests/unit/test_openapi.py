"""The OpenAPI document: every route, and the ranges that are checked."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import hdrs

from cppbatch.engine.params import KINDS, RANGES, SamplingParams
from cppbatch.errors import InvalidRequest
from cppbatch.server import app
from cppbatch.server.api.openai.chat_types import ChatCompletionRequest
from cppbatch.server.api.openai.completions import CompletionRequest
from cppbatch.server.api.responses.types import ResponsesRequest
from cppbatch.server.openapi import document
from cppbatch.server.web_page import page_files

Json = dict[str, Any]

DOCUMENT: Json = msgspec.json.decode(document())


def schema_of(kind: type) -> Json:
    properties: Json = DOCUMENT["components"]["schemas"][kind.__name__]["properties"]
    return properties


def test_every_route_is_in_the_document_and_the_other_way_round() -> None:
    whole = app.create_app(object())  # type: ignore[arg-type]
    routes = {
        (route.method.lower(), route.resource.canonical)
        for route in whole.router.routes()
        if route.resource and route.method not in (hdrs.METH_HEAD, hdrs.METH_OPTIONS)
    }
    assert routes == {(method, path) for path, methods in DOCUMENT["paths"].items() for method in methods}


def test_every_route_has_a_summary_without_a_full_stop() -> None:
    summaries = [each["summary"] for methods in DOCUMENT["paths"].values() for each in methods.values()]
    assert [each for each in summaries if not each or each.endswith(".") or "Raises" in each] == []


@pytest.mark.parametrize("name", [name for name in RANGES if KINDS[name] is float])
@pytest.mark.parametrize("kind", [CompletionRequest, ChatCompletionRequest])
def test_the_document_has_the_ranges_that_are_checked(name: str, kind: type) -> None:
    (number,) = (each for each in schema_of(kind)[name]["anyOf"] if each["type"] != "null")
    for bound, outside in ((number["minimum"], -0.001), (number["maximum"], 0.001)):
        assert getattr(SamplingParams(**{name: bound}), name) == bound
        with pytest.raises(InvalidRequest, match=name):
            SamplingParams(**{name: bound + outside})


def test_the_form_of_the_web_page_has_the_ranges_that_are_checked() -> None:
    form = (Path(app.__file__).parent / "page" / "sampling_form.js").read_text()
    numbers = set(re.findall(r"{name: '(\w+)', .* step: [\d.]+", form)) - {"max_tokens"}
    assert len(numbers) > 10
    served = msgspec.json.decode(page_files()["sampling_params.js"].content.removeprefix(b"export const PARAMS = "))
    assert {name: tuple(served[name]["range"]) for name in numbers} == {name: RANGES[name] for name in numbers}


def test_names_that_others_use_have_the_ranges_too() -> None:
    assert schema_of(ChatCompletionRequest)["top_logprobs"]["anyOf"][0]["maximum"] == 20
    assert schema_of(ChatCompletionRequest)["logprobs"]["anyOf"][0] == {"type": "boolean"}
    assert schema_of(ResponsesRequest)["top_logprobs"]["anyOf"][0]["maximum"] == 20
    assert schema_of(ResponsesRequest)["max_output_tokens"]["anyOf"][0]["maximum"] == 2**31 - 1
    assert schema_of(CompletionRequest)["logprobs"]["anyOf"][0]["maximum"] == 20
    assert schema_of(CompletionRequest)["repeat_penalty"] == schema_of(CompletionRequest)["repetition_penalty"]
    assert schema_of(CompletionRequest)["priority"]["anyOf"][0] == {"type": "integer", "minimum": -100, "maximum": 100}


def test_fields_that_responses_always_have_are_required() -> None:
    schemas = DOCUMENT["components"]["schemas"]
    for name in ("ChatCompletionResponse", "CompletionResponse", "ResponsesResponse"):
        assert {"id", "object"} <= set(schemas[name]["required"])
    assert {"type", "role"} <= set(schemas["MessagesResponse"]["required"])
    assert "type" in schemas["AnthropicErrorResponse"]["required"]
    assert not {"reasoning_content", "tool_calls"} & set(schemas["ResponseMessage"]["required"])
    assert schemas[ChatCompletionRequest.__name__]["required"] == ["messages"]
