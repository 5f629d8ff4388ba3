"""The HTTP API on a tiny model: every bad request gets OpenAI's error object and does not affect other requests."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from cppbatch import BatchInferenceEngine, LocalEngine, SamplingParams
from cppbatch.chat.template import ChatTemplate
from cppbatch.engine import core as core_module
from cppbatch.engine.runtime import load_runtime
from cppbatch.errors import LlamaError, shorten
from cppbatch.server.models.served import OneModel
from cppbatch.server.settings import ServerSettings
from tests.support.http_client import Http, get, http_to, post

HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}


BAD_COMPLETIONS = {
    "no prompt": ({}, "prompt"),
    "empty prompt": ({"prompt": ""}, "prompt"),
    "no prompts": ({"prompt": []}, "prompt"),
    "mixed prompts": ({"prompt": ["a", 3]}, "prompt"),
    "prompt of another type": ({"prompt": 5}, "prompt"),
    "an empty prompt among others": ({"prompt": ["x", "x", ""]}, "prompt[2]"),
    "an empty prompt among others with choices": ({"prompt": ["x", "", "x"], "n": 2, "stream": True}, "prompt[1]"),
    "a negative token id among other prompts": ({"prompt": [[1], [1, -1]]}, "prompt[1][1]"),
    "unknown token id": ({"prompt": [1, 10**6]}, "prompt[1]"),
    "negative token id": ({"prompt": [-1]}, "prompt[0]"),
    "no tokens wanted": ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
    "a model name that is not a string": ({"prompt": "x", "model": 9}, "model"),
    "temperature as text": ({"prompt": "x", "temperature": "hot"}, "temperature"),
    "negative temperature": ({"prompt": "x", "temperature": -0.5}, "temperature"),
    "NaN": ('{"prompt": "x", "temperature": NaN}', "temperature"),
    "infinity": ('{"prompt": "x", "top_p": Infinity}', "top_p"),
    "NaN within a field": ('{"prompt": "x", "logit_bias": {"5": 1, "7": NaN}}', "logit_bias.7"),
    "half of an emoji in a text": ('{"prompt": "x", "stop": ["\\ud83d\\ude00", "\\ud83d"]}', "stop[1]"),
    "half of an emoji in a name": ('{"prompt": "x", "lora": {"\\ude00": 1}}', "lora"),
    "a number of 400 digits": ('{"prompt": "x", "temperature": 1e400}', "temperature"),
    "top_p above 1": ({"prompt": "x", "top_p": 1.5}, "top_p"),
    "top_k as a fraction": ({"prompt": "x", "top_k": 1.5}, "top_k"),
    "n is 0": ({"prompt": "x", "n": 0}, "n"),
    "n is huge": ({"prompt": "x", "n": 10**9}, "n"),
    "seed as text": ({"prompt": "x", "seed": "1"}, "seed"),
    "an empty stop string": ({"prompt": "x", "stop": ["a", ""]}, "stop"),
    "stop of another type": ({"prompt": "x", "stop": 3}, "stop"),
    "stop token out of range": ({"prompt": "x", "stop_token_ids": [10**6]}, "stop_token_ids[0]"),
    "stream options of another type": ({"prompt": "x", "stream_options": 1}, "stream_options"),
    "a million completions": ({"prompt": ["a"] * 2000, "n": 128}, "prompt"),
    "priority out of range": ({"prompt": "x", "priority": 1000}, "priority"),
    "a negative timeout": ({"prompt": "x", "timeout": -1}, "timeout"),
    "a timeout as text": ({"prompt": "x", "queue_timeout": "soon"}, "queue_timeout"),
    "cache_prompt as text": ({"prompt": "x", "cache_prompt": "yes"}, "cache_prompt"),
    "a salt of another type": ({"prompt": "x", "cache_salt": 5}, "cache_salt"),
    "too many logprobs": ({"prompt": "x", "logprobs": 21}, "logprobs"),
    "a suffix, not served yet": ({"prompt": "x", "suffix": "y"}, "suffix"),
    "invalid JSON": ("{", "body"),
    "not an object": ("[]", "body"),
    "not UTF-8": (b'{"prompt": "\xff"}', "body"),
    "an empty body": ("", "body"),
}


@pytest.mark.parametrize(("body", "field"), BAD_COMPLETIONS.values(), ids=BAD_COMPLETIONS.keys())
async def test_a_bad_completion_request_is_a_400_that_names_the_field(http: Http, body: object, field: str) -> None:
    status, answer = await post(http, "/v1/completions", body)
    assert status == 400
    assert answer["error"]["param"] == field
    assert answer["error"]["type"] == "invalid_request_error"
    assert answer["error"]["message"].startswith(field.split("[", maxsplit=1)[0])


BAD_CHATS = {
    "no messages": ({}, "messages"),
    "empty messages": ({"messages": []}, "messages"),
    "unknown role": ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
    "no role": ({"messages": [{"content": "x"}]}, "messages[0]"),
    "an image without its URL": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0].image_url",
    ),
    "an image for a model without a projector": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
        "messages[0].content[0].image_url",
    ),
    "a file": ({"messages": [{"role": "user", "content": [{"type": "file"}]}]}, "messages[0].content[0]"),
    "content of another type": ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
    "a tool without its function": ({**HELLO, "tools": [{"type": "function"}]}, "tools[0].function"),
    "a schema that is none": (
        {**HELLO, "response_format": {"type": "json_object", "schema": {"type": 5}}},
        "response_format",
    ),
}


@pytest.mark.parametrize(("body", "field"), BAD_CHATS.values(), ids=BAD_CHATS.keys())
async def test_a_bad_chat_request_is_a_400_that_names_the_field(http: Http, body: object, field: str) -> None:
    status, answer = await post(http, "/v1/chat/completions", body)
    assert (status, answer["error"]["param"]) == (400, field)


async def test_max_completion_tokens_wins_over_its_older_name(http: Http) -> None:
    body = {**HELLO, "max_tokens": 9, "max_completion_tokens": 2, "ignore_eos": True}
    _, answer = await post(http, "/v1/chat/completions", body)
    assert answer["usage"]["completion_tokens"] == 2


async def test_choices_of_a_seeded_prompt_differ_and_can_be_had_again(http: Http) -> None:
    body = {"prompt": "abc", "n": 3, "seed": -2, "temperature": 1, "max_tokens": 12}
    first, again = [(await post(http, "/v1/completions", body))[1]["choices"] for _ in range(2)]
    assert first == again
    assert len({choice["text"] for choice in first}) == 3


async def test_unknown_fields_are_ignored_as_openai_does(http: Http) -> None:
    status, _ = await post(http, "/v1/chat/completions", {**HELLO, "user": "me", "parallel_tool_calls": True, "x": 1})
    assert status == 200


async def test_an_unknown_path_and_a_wrong_method_are_error_objects_too(http: Http) -> None:
    async with http.get("/v1/nothing") as missing, http.delete("/v1/models") as wrong:
        assert (missing.status, wrong.status) == (404, 405)
        assert "GET /v1/nothing" in (await missing.json())["error"]["message"]
        assert "DELETE /v1/models" in (await wrong.json())["error"]["message"]
        assert wrong.headers["Allow"]


async def test_a_path_or_method_that_does_not_exist_is_refused_with_the_one_to_use(http: Http) -> None:
    refused = {
        ("POST", "/v1/chat/completion"): "did you mean /v1/chat/completions?",
        ("POST", "/v1/v1/chat/completions"): "did you mean /v1/chat/completions?",
        ("GET", "/v1/chat/completions"): "use POST",
        ("DELETE", "/v1/models"): "use GET or HEAD",
        ("GET", "/nowhere/at/all"): "see /openapi.json for the available paths",
        ("GET", f"/v1/chat/completions/{'x' * 5000}"): "see /openapi.json for the available paths",
    }
    for (method, path), remedy in refused.items():
        async with http.request(method, path, json={}) as answer:
            assert (await answer.json())["error"]["message"] == shorten(f"{method} {path} not found; {remedy}")


async def test_one_bad_prompt_among_many_fails_the_request_before_anything_is_sent(http: Http) -> None:
    status, answer = await post(http, "/v1/completions", {"prompt": ["good", "x" * 5000], "stream": True})
    assert (status, answer["error"]["param"]) == (400, "prompt[1]")
    async with http.get("/stats") as stats:
        assert (await stats.json())["waiting"] == 0


async def test_bad_requests_do_not_disturb_a_running_one(http: Http) -> None:
    good = {"prompt": "abc", "max_tokens": 40, "temperature": 0}
    alone = await post(http, "/v1/completions", good)
    bad = [post(http, "/v1/completions", body) for body, _ in BAD_COMPLETIONS.values()]
    among, *_ = await asyncio.gather(post(http, "/v1/completions", good), *bad)
    assert among[1]["choices"][0]["text"] == alone[1]["choices"][0]["text"]


async def test_a_stream_is_server_sent_events_that_end_with_done(http: Http) -> None:
    async with http.post("/v1/chat/completions", json={**HELLO, "stream": True}) as answer:
        assert answer.content_type == "text/event-stream"
        *events, done, rest = (await answer.text()).split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert all(json.loads(event.removeprefix("data: "))["object"] == "chat.completion.chunk" for event in events)


async def test_no_text_ends_a_line_of_a_stream(http: Http) -> None:
    prompt = "a\x85b\u2028c\u2029d\x0ce"  # Python's `splitlines`, and httpx's `iter_lines`, end a line at each
    body = {"model": "x", "prompt": prompt, "echo": True, "max_tokens": 1, "stream": True}
    async with http.post("/v1/completions", json=body) as answer:
        lines = (await answer.text()).splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line and line != "data: [DONE]"]
    assert "".join(event["choices"][0]["text"] for event in events).startswith(prompt)


async def test_a_failed_step_is_a_500_and_the_server_continues(
    http: Http, engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_batch: object) -> None:
        raise LlamaError("the device is on fire")

    with monkeypatch.context() as broken:
        assert engine._engine
        broken.setattr(engine._engine.runtime.context, "decode", fail)
        status, answer = await post(http, "/v1/chat/completions", HELLO)
    assert (status, answer["error"]["message"]) == (500, "the device is on fire")
    assert (await post(http, "/v1/chat/completions", HELLO))[0] == 200


async def test_while_the_model_loads_health_reports_the_progress(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, go_on, load = threading.Event(), threading.Event(), load_runtime

    def slow_load(config: Any, progress: Any) -> Any:
        progress(0.42)
        reached.set()
        assert go_on.wait(30)
        return load(config, progress)

    monkeypatch.setattr(core_module, "load_runtime", slow_load)
    engine = LocalEngine(tiny_llama, n_ctx=256, n_threads=1)
    async with http_to(engine) as http:
        await asyncio.to_thread(reached.wait, 30)
        async with http.get("/health") as answer:
            assert answer.status == 503
            assert await answer.json() == {"status": "loading", "progress": 0.42}
        status, answer = await post(http, "/v1/chat/completions", HELLO)
        assert (status, answer["error"]["code"]) == (503, "loading")
        assert "42%" in answer["error"]["message"]
        go_on.set()
        await engine.loaded()
        async with http.get("/health") as answer:
            assert answer.status == 200
        await engine.close()


async def test_the_http_answer_has_the_engines_values(http: Http, tiny_llama: Path) -> None:
    with BatchInferenceEngine(tiny_llama, n_ctx=1024, n_parallel=4, n_threads=1) as engine:
        (expected,) = engine.generate(["abc"], SamplingParams(temperature=0, max_tokens=20))
    _, answer = await post(http, "/v1/completions", {"prompt": "abc", "temperature": 0, "max_tokens": 20})
    assert answer["choices"][0]["text"] == expected.text
    assert answer["usage"]["completion_tokens"] == len(expected.tokens)


def test_a_chat_template_runs_in_a_sandbox_and_its_error_is_returned_to_the_client() -> None:
    from cppbatch.errors import InvalidRequest

    message = [{"role": "user", "content": "hi"}]
    assert ChatTemplate(None, bos="", eos="").render(message).endswith("<|im_start|>assistant\n")
    for source in ("{{ raise_exception('no system role') }}", "{{ messages.__class__.__mro__ }}", "{% if %}"):
        with pytest.raises(InvalidRequest, match="chat template"):
            ChatTemplate(source, bos="", eos="").render(message)


async def test_the_chat_template_of_the_settings_replaces_the_models(engine: LocalEngine) -> None:
    settings = ServerSettings(chat_template="{{ raise_exception('mine') }}")
    async with http_to(engine, settings) as http:
        status, answer = await post(http, "/v1/chat/completions", HELLO)
    assert status == 400
    assert answer["error"]["param"] == "messages"
    assert answer["error"]["message"].endswith("mine")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/props"])
async def test_a_slow_chat_template_does_not_delay_other_requests(engine: LocalEngine, path: str) -> None:
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    endless += path  # a template that was stopped stays known
    async with http_to(engine, ServerSettings(chat_template=endless)) as http:
        first = asyncio.create_task(post(http, path, HELLO) if path != "/props" else get(http, path))
        n_answered = 0
        while not first.done():
            await get(http, "/health")
            n_answered += 1
        await first
    assert n_answered > 5, "none waits for the template to be stopped"


async def test_the_models_chat_format_is_one_for_the_server_and_its_engine(engine: LocalEngine) -> None:
    serving = OneModel.of(engine, ServerSettings()).serving
    assert await serving.chat_format() is await engine.chat_format()
    assert serving.chat_forms == (await engine.chat_format()).forms


async def test_a_full_queue_is_a_429_with_a_retry_hint_and_the_others_get_their_answers(tiny_llama: Path) -> None:
    async with (
        LocalEngine(tiny_llama, n_ctx=1024, n_parallel=1, n_threads=1, max_queue=2) as engine,
        http_to(engine) as http,
    ):
        body = {"prompt": "Hello", "max_tokens": 200, "ignore_eos": True}

        async def ask() -> tuple[int, str | None, Any]:
            async with http.post("/v1/completions", json=body) as answer:
                return answer.status, answer.headers.get("Retry-After"), await answer.json()

        answers = await asyncio.gather(*(ask() for _ in range(8)))
        refused = [(retry_after, answer) for status, retry_after, answer in answers if status == 429]
        assert sorted({status for status, _, _ in answers}) == [200, 429]
        assert len(refused) >= 4  # one runs, two wait, and perhaps one more came in when the first had begun
        for retry_after, answer in refused:
            assert int(retry_after or 0) >= 1
            assert answer["error"]["code"] == "queue_full"
            assert "--max-queue" in answer["error"]["message"]
        assert (await engine.stats()).running == 0


async def test_more_choices_than_the_queue_holds_wait_and_let_others_in_between(tiny_llama: Path) -> None:
    async with (
        LocalEngine(tiny_llama, n_ctx=1024, n_parallel=1, n_threads=1, max_queue=2) as engine,
        http_to(engine) as http,
    ):
        body = {"prompt": "Hello", "max_tokens": 100, "ignore_eos": True, "n": 8}
        many = asyncio.create_task(post(http, "/v1/completions", body))
        await asyncio.sleep(0.05)
        status, _ = await post(http, "/v1/completions", {"prompt": "Hi", "max_tokens": 1})
        assert status == 200
        assert not many.done()
        status, answer = await many
        assert (status, len(answer["choices"])) == (200, 8)
        stats = await engine.stats()
        assert (stats.running, stats.waiting, stats.kv_cells_used) == (0, 0, 0)


async def test_a_timeout_gives_the_text_so_far(http: Http) -> None:
    body = {"prompt": "Hello", "max_tokens": 900, "ignore_eos": True, "timeout": 0.1}
    status, answer = await post(http, "/v1/completions", body)
    assert (status, answer["choices"][0]["finish_reason"]) == (200, "timeout")
    assert 0 < answer["usage"]["completion_tokens"] < 900
    assert answer["choices"][0]["text"]


async def test_usage_reports_how_much_of_the_prompt_was_cached(http: Http) -> None:
    async def cached(**fields: Any) -> int:
        body = {"prompt": "the cat sat on the mat and " * 12, "max_tokens": 2, **fields}
        _, answer = await post(http, "/v1/completions", body)
        assert answer["usage"]["prompt_tokens"] > 100
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert await cached() == 0
    assert await cached() > 100
    assert await cached(cache_prompt=False) == 0
    assert await cached(cache_salt="mine") == 0
    assert await cached(cache_salt="mine") > 100
    assert await cached(n=3) > 100
    assert await cached(n=3, cache_salt="new") == 0  # two of the three had it from the first, which computed it
