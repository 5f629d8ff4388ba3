"""Defaults of the server's flags reach every API, and a request's own fields come first; llama.cpp's chat templates by
name; several addresses."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from typing import Any

import aiohttp
import pytest

from cppbatch import GenerationEvent, GenerationRequest, LocalEngine, SamplingParams
from cppbatch.chat.template import find_template
from cppbatch.errors import ConfigError, InvalidRequest, LlamaError
from cppbatch.llama import apply_builtin_template, builtin_template_names
from cppbatch.server.address import Address
from cppbatch.server.app import create_app
from cppbatch.server.http.limits import Limits
from cppbatch.server.listener import listen
from cppbatch.server.settings import ServerSettings
from tests.support.fixtures import engine_of
from tests.support.http_client import Http, http_to

Json = dict[str, Any]

HELLO = [{"role": "user", "content": "hello"}]
REQUESTS: dict[str, Json] = {
    "/v1/completions": {"prompt": "ab"},
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/responses": {"input": "ab"},
    "/v1/messages": {"model": "", "messages": HELLO, "max_tokens": 3},
    "/completion": {"prompt": "ab"},
    "/generate": {"prompt": "ab"},
}
DEFAULTS: Json = {
    "temperature": 0.25,
    "top_k": 7,
    "seed": 5,
    "penalty_last_n": 9,
    "samplers": ["top_k"],
    "max_tokens": 3,
}


class Recording(LocalEngine):
    """Keeps the requests that it gets."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.requests: list[GenerationRequest] = []

    async def submit(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        self.requests.append(request)
        async with contextlib.aclosing(super().submit(request)) as events:
            async for event in events:
                yield event


engine = engine_of(Recording)


def serving(engine: LocalEngine, **settings: Any) -> Http:
    return http_to(engine, ServerSettings(**settings))


async def params_of(http: Http, engine: Recording, path: str, body: Json) -> SamplingParams:
    """The sampling parameters that the engine gets for a request."""
    engine.requests.clear()
    body = body | ({"model": engine.info.name} if "model" in body else {})
    async with http.post(path, json=body) as answer:
        assert answer.status == 200, await answer.text()
    return engine.requests[0].params


@pytest.mark.parametrize("path", REQUESTS)
async def test_a_request_without_fields_gets_the_servers_defaults(engine: Recording, path: str) -> None:
    async with serving(engine, sampling_defaults=DEFAULTS) as http:
        params = await params_of(http, engine, path, REQUESTS[path])
        assert {name: getattr(params, name) for name in DEFAULTS} == DEFAULTS | {"samplers": ("top_k",)}
        own = await params_of(http, engine, path, REQUESTS[path] | {"temperature": 0.5, "seed": 6})
        assert (own.temperature, own.seed, own.top_k) == (0.5, 6, 7)


async def test_the_default_length_is_the_servers_then_the_apis(engine: Recording) -> None:
    completion = {"prompt": "ab"}
    async with serving(engine) as http:
        assert (await params_of(http, engine, "/v1/completions", completion)).max_tokens == 16
    async with serving(engine, sampling_defaults={"max_tokens": 4}, limits=Limits(max_tokens=3)) as http:
        assert (await params_of(http, engine, "/v1/completions", completion)).max_tokens == 3
    async with serving(engine, sampling_defaults={"max_tokens": 4}, limits=Limits(max_tokens=6)) as http:
        assert (await params_of(http, engine, "/v1/completions", completion)).max_tokens == 4
        assert (await params_of(http, engine, "/completion", {**completion, "n_predict": -1})).max_tokens == 6
        assert (await params_of(http, engine, "/completion", {**completion, "n_predict": 5})).max_tokens == 5


async def test_the_properties_show_the_defaults(engine: Recording) -> None:
    async with serving(engine, sampling_defaults=DEFAULTS) as http, http.get("/props") as answer:
        shown = (await answer.json())["default_generation_settings"]["params"]
        assert (shown["temperature"], shown["top_k"], shown["n_predict"], shown["repeat_last_n"]) == (0.25, 7, 3, 9)


async def rendered(http: Http, body: Json) -> str:
    async with http.post("/apply-template", json=body) as answer:
        assert answer.status == 200, await answer.text()
        prompt: str = (await answer.json())["prompt"]
        return prompt


async def test_variables_of_the_template_are_the_requests_then_the_servers(engine: Recording) -> None:
    settings: Json = {"chat_template": "{{ enable_thinking }} {{ a }} <think>"}
    body: Json = {"messages": HELLO}
    async with serving(engine, **settings) as http:
        assert await rendered(http, body) == "True  <think>"
        assert await rendered(http, {**body, "reasoning_effort": "none"}) == "False  <think>"
    async with serving(engine, **settings, template_variables={"enable_thinking": False, "a": 1}) as http:
        assert await rendered(http, body) == "False 1 <think>"
        own = {"enable_thinking": True}
        assert await rendered(http, {**body, "chat_template_kwargs": own}) == "True 1 <think>"


async def test_text_parts_are_lines(engine: Recording) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    async with serving(engine, chat_template="{{ messages[0].content }}") as http:
        assert await rendered(http, {"messages": [{"role": "user", "content": parts}]}) == "one\ntwo"


TURNS = [("system", "S"), ("user", "Grüße"), ("assistant", "A"), ("user", "B")]


def test_llama_cpps_templates_have_names() -> None:
    names = builtin_template_names()
    assert {"chatml", "vicuna", "llama4", "gpt-oss"} <= set(names)
    for name in names:
        text = apply_builtin_template(name, TURNS, True)
        assert "Grüße" in text
        assert text.startswith(apply_builtin_template(name, TURNS, False)), name


def test_a_template_is_applied_as_llama_cpp_writes_it() -> None:
    assert apply_builtin_template("vicuna", TURNS, True) == "S\n\nUSER: Grüße\nASSISTANT: A</s>\nUSER: B\nASSISTANT:"
    with pytest.raises(LlamaError, match=r"unknown llama\.cpp chat template .nosuch'"):
        apply_builtin_template("nosuch", TURNS, True)
    with pytest.raises(InvalidRequest, match=r"messages\[0\]: contains a null character"):
        apply_builtin_template("vicuna", [("user", "a\0b")], True)


async def test_a_server_uses_llama_cpps_template_by_its_name(engine: Recording) -> None:
    template = find_template("vicuna", builtin_template_names)
    turns = [{"role": role, "content": text} for role, text in TURNS]
    async with serving(engine, chat_template=template) as http:
        prompt = await rendered(http, {"messages": turns})
        assert prompt == apply_builtin_template("vicuna", TURNS, True)
        unfinished = await rendered(http, {"messages": turns[:3]})
        assert unfinished.endswith("ASSISTANT: A")
        tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
        assert '"weather"' in await rendered(http, {"messages": turns, "tools": [tool]})
        async with http.post("/v1/chat/completions", json={"messages": turns, "max_tokens": 2}) as answer:
            assert answer.status == 200
    with pytest.raises(ConfigError, match=r"chatml.*vicuna"):
        find_template("nosuch", builtin_template_names)


async def test_the_server_answers_at_each_of_its_addresses(engine: Recording) -> None:
    address = Address(hosts=("127.0.0.1", "127.0.0.2", "127.0.0.1"), port=0)
    async with await listen(create_app(engine), address, max_open=10, idle_timeout=60) as listener:
        assert [url.rsplit(":", 1)[0] for url in listener.urls] == ["http://127.0.0.1", "http://127.0.0.2"]
        assert listener.is_private
        async with aiohttp.ClientSession() as session:
            for url in listener.urls:
                async with session.get(f"{url}/health") as answer:
                    assert answer.status == 200


async def test_no_address_is_taken_when_one_is_in_use(engine: Recording) -> None:
    async with await listen(create_app(engine), Address(port=0), max_open=10, idle_timeout=60) as first:
        port = int(first.url.rsplit(":", 1)[1])
        both = Address(hosts=("127.0.0.2", "127.0.0.1"), port=port)
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            await listen(create_app(engine), both, max_open=10, idle_timeout=60)
        async with await listen(
            create_app(engine), Address(hosts=("127.0.0.2",), port=port), max_open=10, idle_timeout=60
        ) as second:
            assert second.url == f"http://127.0.0.2:{port}"
