"""Ollama's API: what its clients get, streamed and whole, and what the model gets."""

from __future__ import annotations

import asyncio
import json
import urllib.error
from collections.abc import AsyncIterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from cppbatch.server.api.ollama.models import API_VERSION
from cppbatch.server.auth.rules import Keys, api_key
from tests.integration.test_many_models import serve, states, wait_for
from tests.support import tiny_models, tiny_projectors
from tests.support.fixtures import chat_server
from tests.support.http_client import Http, answered, get, http_of, post
from tests.support.media_samples import RED, as_base64, as_url
from tests.support.scripted_chat import ENDS, SCRIPT, ChatServer, ScriptedFormat

Json = dict[str, Any]

server = chat_server()
pytestmark = pytest.mark.usefixtures("own_format")

SHORT: Json = {"temperature": 0, "num_predict": 8}
ASK: Json = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "options": SHORT}
PROMPT: Json = {"model": "tiny", "prompt": "hello", "options": SHORT}
WEATHER: Json = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
TIME: Json = {"type": "function", "function": {"name": "time", "parameters": {"type": "object"}}}
DURATIONS = ("total_duration", "prompt_eval_duration", "eval_duration")


def whole(server: ChatServer, path: str, body: Json) -> Json:
    answer: Json = server.post(path, {**body, "stream": False})
    return answer


def lines(server: ChatServer, path: str, body: Json) -> list[Json]:
    with server.stream(path, body) as answer:
        assert answer.headers["Content-Type"] == "application/x-ndjson"
        return [json.loads(line) for line in answer.read().splitlines()]


def refusal(server: ChatServer, path: str, body: Json) -> tuple[int, str]:
    with pytest.raises(urllib.error.HTTPError) as caught:
        server.post(path, body)
    answer = json.load(caught.value)
    assert list(answer) == ["error"]
    return caught.value.code, answer["error"]


# --- chats ----------------------------------------------------------------------------------------------------------


def test_a_chat_is_streamed_as_lines_by_default_with_the_text_of_the_whole_one(server: ChatServer) -> None:
    answer, parts = whole(server, "/api/chat", ASK), lines(server, "/api/chat", ASK)
    assert answer["message"]["role"] == "assistant"
    assert answer["message"]["content"] == "".join(part["message"]["content"] for part in parts)
    assert [part["done"] for part in parts] == [False] * (len(parts) - 1) + [True]
    for last in (answer, parts[-1]):
        assert (last["model"], last["done"], last["done_reason"], last["eval_count"]) == ("tiny", True, "length", 8)
        assert last["prompt_eval_count"] > 0
        assert all(isinstance(last[name], int) and last[name] > 0 for name in DURATIONS)
        assert last["created_at"].endswith("Z")


def test_it_is_the_text_of_chat_completions(server: ChatServer) -> None:
    chat = server.post("/v1/chat/completions", {"messages": ASK["messages"], "temperature": 0, "max_tokens": 8})
    assert whole(server, "/api/chat", ASK)["message"]["content"] == chat["choices"][0]["message"]["content"]


def test_thoughts_and_calls_are_fields_streamed_or_not(server: ChatServer) -> None:
    server.use(ScriptedFormat(SCRIPT, **ENDS))
    body = {**ASK, "tools": [WEATHER, TIME], "options": {"num_predict": 40}}
    answer, parts = whole(server, "/api/chat", body)["message"], lines(server, "/api/chat", body)
    assert (answer["thinking"], answer["content"]) == ("Let me think.", "I shall look.")
    called = [(call["function"]["name"], call["function"]["arguments"]) for call in answer["tool_calls"]]
    assert called == [("weather", {"city": "Paris"}), ("time", {})]
    assert "".join(part["message"].get("thinking", "") for part in parts) == answer["thinking"]
    assert "".join(part["message"]["content"] for part in parts) == answer["content"]
    streamed = [call for part in parts for call in part["message"].get("tool_calls", ())]
    assert streamed == answer["tool_calls"]
    assert parts[-1]["done_reason"] == "stop"


def test_results_without_ids_answer_the_calls_in_their_order_or_by_the_name_of_the_tool(server: ChatServer) -> None:
    form = ScriptedFormat(SCRIPT, **ENDS)
    server.use(form)
    calls = [{"function": {"name": name, "arguments": {"at": "noon"}}} for name in ("weather", "time")]
    messages = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "", "thinking": "Hm.", "tool_calls": calls},
        {"role": "tool", "tool_name": "time", "content": "12"},
        {"role": "tool", "content": "rain"},
    ]
    whole(server, "/api/chat", {**ASK, "messages": messages})
    assistant, time, weather = form.asked["messages"][1:]
    ids = [call["id"] for call in assistant["tool_calls"]]
    assert (weather["tool_call_id"], time["tool_call_id"]) == tuple(ids)
    assert (weather["name"], time["name"]) == ("weather", "time")
    assert assistant["reasoning_content"] == "Hm."
    assert assistant["tool_calls"][0]["function"]["arguments"] == {"at": "noon"}


@pytest.mark.parametrize(
    ("think", "variables"),
    [
        (None, {}),
        (False, {"enable_thinking": False, "reasoning_effort": "none"}),
        (True, {"enable_thinking": True}),
        ("high", {"enable_thinking": True, "reasoning_effort": "high"}),
    ],
)
def test_think_is_for_the_template(server: ChatServer, think: Any, variables: Json) -> None:
    form = ScriptedFormat(SCRIPT, **ENDS)
    form.forms = type(form.forms)(tool_calls="", tools_described_by="template", thoughts="<think> ... </think>")
    server.use(form)
    serving: Any = server.serving
    serving.__dict__.pop("chat_forms", None)
    try:
        whole(server, "/api/chat", {**ASK, "think": think})
        whole(server, "/api/generate", {**PROMPT, "think": think})
    finally:
        serving.__dict__.pop("chat_forms", None)
    assert form.asked["variables"] == variables


def test_a_model_that_does_not_reason_refuses_think(server: ChatServer) -> None:
    status, error = refusal(server, "/api/chat", {**ASK, "think": True})
    assert (status, '"tiny" does not support thinking' in error) == (400, True)
    assert whole(server, "/api/chat", {**ASK, "think": False})["done"]


def test_format_is_json_or_a_schema(server: ChatServer) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [3]}}, "required": ["n"], "additionalProperties": False}
    body = {**ASK, "options": {"temperature": 0, "num_predict": 60}}
    for path, request in (("/api/chat", body), ("/api/generate", {**PROMPT, "options": body["options"]})):
        answer = whole(server, path, {**request, "format": schema})
        assert json.loads(answer.get("response") or answer["message"]["content"]) == {"n": 3}
    raw = whole(server, "/api/generate", {**PROMPT, "options": body["options"], "format": schema, "raw": True})
    assert json.loads(raw["response"]) == {"n": 3}
    assert whole(server, "/api/chat", {**ASK, "format": "json"})["message"]["content"].lstrip().startswith("{")
    assert whole(server, "/api/chat", {**ASK, "format": ""})["message"] == whole(server, "/api/chat", ASK)["message"]
    assert refusal(server, "/api/chat", {**ASK, "format": "xml"})[0] == 400


def test_logprobs_are_with_the_tokens(server: ChatServer) -> None:
    body = {**ASK, "logprobs": True, "top_logprobs": 2}
    whole(server, "/api/chat", body)  # the next two both find its prefix: a prompt in other pieces rounds differently
    answer, parts = whole(server, "/api/chat", body), lines(server, "/api/chat", body)
    assert [len(entry["top_logprobs"]) for entry in answer["logprobs"]] == [2] * 8
    streamed = [entry for part in parts for entry in part.get("logprobs", ())]
    assert [entry["bytes"] for entry in streamed] == [entry["bytes"] for entry in answer["logprobs"]]
    logprobs = [
        [top["logprob"] for entry in each for top in entry["top_logprobs"]] for each in (streamed, answer["logprobs"])
    ]
    assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-5), "drafts compute other numbers of rows"
    assert "logprobs" not in whole(server, "/api/chat", ASK)
    status, error = refusal(server, "/api/chat", {**body, "top_logprobs": 99})
    assert (status, error.startswith("top_logprobs: is 99")) == (400, True)


# --- options --------------------------------------------------------------------------------------------------------


def test_options_are_those_of_chat_completions_under_ollamas_names(server: ChatServer) -> None:
    options = {"seed": 7.0, "temperature": 1.5, "top_k": 30, "repeat_penalty": 1.3, "repeat_last_n": 20, "mirostat": 2}
    fields = {**options, "max_tokens": 6, "seed": 7}
    expected = server.post("/v1/chat/completions", {"messages": ASK["messages"], **fields})
    answer = whole(server, "/api/chat", {**ASK, "options": {**options, "num_predict": 6, "stop": None}})
    assert answer["message"]["content"] == expected["choices"][0]["message"]["content"]
    stop = answer["message"]["content"][1:3]
    stopped = whole(server, "/api/chat", {**ASK, "options": {**options, "num_predict": 6, "stop": [stop]}})
    assert stopped["message"]["content"] == answer["message"]["content"].partition(stop)[0]
    assert stopped["done_reason"] == "stop"


def test_num_predict_below_one_has_no_limit(server: ChatServer) -> None:
    asked = {**ASK, "messages": [{"role": "user", "content": "a" * 900}]}  # most of the context
    for n in (-1, -2, 0):
        answer = whole(server, "/api/chat", {**asked, "options": {"num_predict": n, "ignore_eos": True}})
        assert answer["prompt_eval_count"] > 900
        assert answer["prompt_eval_count"] + answer["eval_count"] == 1024
        assert answer["done_reason"] == "length"


def test_options_without_effect_are_a_line_in_the_log_and_invalid_ones_an_error(
    server: ChatServer, caplog: pytest.LogCaptureFixture
) -> None:
    assert whole(server, "/api/chat", {**ASK, "options": {"num_ctx": 9999, "num_gpu": 1, "colour": "red", **SHORT}})
    logged = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert any("num_ctx 9999 has no effect" in line for line in logged)
    assert any("colour" in line and "num_gpu" not in line for line in logged)
    for options, error in (
        ({"temperature": "warm"}, "options.temperature: expected"),
        ({"temperature": -1}, "options.temperature: is -1.0; it must be"),
        ({"repeat_penalty": 1000}, "options.repeat_penalty: is 1000"),
        ({"stop": [1]}, "options.stop"),
    ):
        status, message = refusal(server, "/api/chat", {**ASK, "options": options})
        assert (status, message[: len(error)]) == (400, error)


def test_a_longer_conversation_than_the_context_loses_its_oldest_messages(server: ChatServer) -> None:
    long = [
        {"role": role, "content": f"{i} " + "a long story " * 20} for i in range(12) for role in ("user", "assistant")
    ]
    messages = [{"role": "system", "content": "be brief"}, *long, {"role": "user", "content": "and now?"}]
    status, error = refusal(server, "/api/chat", {**ASK, "messages": messages, "truncate": False})
    assert (status, "maximum context length is 1024 tokens" in error) == (400, True)
    answer = whole(server, "/api/chat", {**ASK, "messages": messages})
    assert 512 < answer["prompt_eval_count"] <= 1024 - 128
    alone = [{"role": "user", "content": "too long " * 2000}]
    assert refusal(server, "/api/chat", {**ASK, "messages": alone})[0] == 400


# --- generate -------------------------------------------------------------------------------------------------------


def test_a_generated_text_is_the_answer_to_a_message_and_raw_has_no_template(server: ChatServer) -> None:
    chat = whole(server, "/api/chat", {**ASK, "messages": [{"role": "system", "content": "be kind"}, *ASK["messages"]]})
    answer = whole(server, "/api/generate", {**PROMPT, "system": "be kind"})
    assert answer["response"] == chat["message"]["content"]
    parts = lines(server, "/api/generate", {**PROMPT, "system": "be kind"})
    assert "".join(part["response"] for part in parts) == answer["response"]
    assert parts[-1]["context"] == answer["context"]
    raw = whole(server, "/api/generate", {**PROMPT, "raw": True})
    text = server.post("/v1/completions", {"prompt": "hello", "temperature": 0, "max_tokens": 8})
    assert raw["response"] == text["choices"][0]["text"]
    assert "context" not in raw


def test_context_continues_an_earlier_response(server: ChatServer) -> None:
    first = whole(server, "/api/generate", PROMPT)
    second = whole(server, "/api/generate", {**PROMPT, "prompt": "more", "context": first["context"]})
    assert second["context"][: len(first["context"])] == first["context"]
    assert second["prompt_eval_count"] > first["prompt_eval_count"] + first["eval_count"]
    assert refusal(server, "/api/generate", {**PROMPT, "context": [10**6]})[0] == 400


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"template": "{{ .Prompt }}"}, "template"),
        ({"raw": True, "system": "x"}, "system"),
        ({"raw": True, "context": [1]}, "context"),
        ({"suffix": "x"}, "suffix"),
        ({"images": [as_base64(RED)]}, "images[0]"),
    ],
)
def test_what_cannot_be_generated_is_refused_with_its_name(server: ChatServer, fields: Json, field: str) -> None:
    status, error = refusal(server, "/api/generate", {**PROMPT, **fields})
    assert (status, error.partition(": ")[0]) == (400, field)


async def test_images_are_base64_with_or_without_the_start_of_a_url(tiny_llama: Path, tmp_path: Path) -> None:
    eyes = tiny_projectors.vision(tmp_path / "eyes.gguf")
    async with http_of(tiny_llama, n_ctx=2048, n_parallel=2, n_threads=1, spec="off", mmproj=str(eyes)) as http:
        texts = []
        for image in (as_base64(RED), as_url(RED)):
            message = {"role": "user", "content": "what?", "images": [image]}
            chat = await answered(http, "/api/chat", {**ASK, "messages": [message], "stream": False})
            text = await answered(
                http, "/api/generate", {**PROMPT, "prompt": "what?", "images": [image], "stream": False}
            )
            assert chat["message"]["content"] == text["response"]
            texts.append(text["response"])
        assert texts[0] == texts[1]
        shown = await answered(http, "/api/show", {"model": "tiny"})
        assert "vision" in shown["capabilities"]


# --- embeddings -----------------------------------------------------------------------------------------------------


@pytest.fixture
async def vectors(tmp_path: Path) -> AsyncIterator[Http]:
    model = tiny_models.encoder_only(tmp_path / "vectors.gguf")
    async with http_of(model, n_ctx=256, n_parallel=2, n_threads=1) as http:
        yield http


async def test_embeddings_are_those_of_v1(vectors: Http) -> None:
    texts = ["one cat", "two dogs and a cat"]
    expected = await answered(vectors, "/v1/embeddings", {"input": texts})
    answer = await answered(vectors, "/api/embed", {"model": "v", "input": texts})
    for ours, theirs in zip(answer["embeddings"], expected["data"], strict=True):
        assert ours == pytest.approx(theirs["embedding"], abs=1e-5)  # the texts may be in one step, or in two
    assert answer["prompt_eval_count"] == expected["usage"]["prompt_tokens"]
    assert answer["model"] == "v"
    one = await answered(vectors, "/api/embed", {"model": "v", "input": texts[0], "dimensions": 4})
    assert [len(each) for each in one["embeddings"]] == [4]
    old = await answered(vectors, "/api/embeddings", {"model": "v", "prompt": texts[0]})
    ratio = old["embedding"][0] / answer["embeddings"][0][0]
    assert old["embedding"] == pytest.approx([value * ratio for value in answer["embeddings"][0]], rel=1e-4)
    assert await answered(vectors, "/api/embed", {"model": "v"}) == {"model": "v", "embeddings": []}
    assert await answered(vectors, "/api/embeddings", {"model": "v"}) == {"embedding": []}


async def test_the_end_of_a_text_longer_than_the_context_is_cut_off_unless_it_is_refused(vectors: Http) -> None:
    text = "the cat said that it was " * 200
    answer = await answered(vectors, "/api/embed", {"model": "v", "input": text})
    assert answer["prompt_eval_count"] == 256
    status, refused = await post(vectors, "/api/embed", {"model": "v", "input": text, "truncate": False})
    assert (status, refused["error"].startswith("This model's maximum context length is 256")) == (400, True)
    status, refused = await post(vectors, "/api/chat", {**ASK, "model": "v"})
    assert (status, list(refused)) == (400, ["error"])


# --- models ---------------------------------------------------------------------------------------------------------


def test_a_server_describes_its_model(server: ChatServer) -> None:
    (listed,) = server.get("/api/tags")["models"]
    name = server.get("/v1/models")["data"][0]["id"]
    assert listed["name"] == listed["model"] == name
    assert (listed["details"]["family"], listed["details"]["format"]) == ("llama", "gguf")
    assert len(listed["digest"]) == 64
    (running,) = server.get("/api/ps")["models"]
    assert (running["name"], running["digest"], running["context_length"]) == (name, listed["digest"], 1024)
    for asked in (name, f"{name}:latest", "any"):
        shown = server.post("/api/show", {"model": asked, "verbose": True})
        assert shown["details"] == listed["details"]
        assert shown["capabilities"] == ["completion", "tools"]
        assert shown["model_info"]["general.architecture"] == "llama"
        assert shown["model_info"]["tokenizer.ggml.tokens"] is None
        assert {"name", "type", "shape"} == set(shown["tensors"][0])
    assert server.get("/api/version") == {"version": API_VERSION}
    assert refusal(server, "/api/show", {})[0] == 400
    assert refusal(server, "/api/nothing", {})[0] == 404


def test_a_request_without_a_prompt_loads_the_model(server: ChatServer) -> None:
    for path in ("/api/chat", "/api/generate"):
        answer = server.post(path, {"model": "tiny"})
        assert (answer["done"], answer["done_reason"]) == (True, "load")
    status, error = refusal(server, "/api/chat", {"model": "tiny", "keep_alive": 0})  # its engine has no process
    assert (status, error.startswith("keep_alive: is 0, but the only model")) == (409, True)
    assert refusal(server, "/api/chat", {**ASK, "keep_alive": "soon"})[0] == 400


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    tiny_models.llama(folder / "one-Q8_0.gguf")
    tiny_models.llama(folder / "two.gguf", seed=1)
    return folder


async def test_keep_alive_says_how_long_a_model_stays_loaded(folder: Path) -> None:
    async with serve(folder) as http:
        assert (await answered(http, "/api/generate", {"model": "two:latest"}))["done_reason"] == "load"
        (running,) = (await get(http, "/api/ps"))[1]["models"]
        assert running["name"] == "two"
        assert running["expires_at"] > "2300"
        await answered(http, "/api/chat", {**ASK, "model": "one:Q8_0", "keep_alive": "5m", "stream": False})
        assert await states(http) == {"one-Q8_0": "loaded", "two": "loaded"}
        expiries = {each["name"]: each["expires_at"] for each in (await get(http, "/api/ps"))[1]["models"]}
        left = datetime.fromisoformat(expiries["one-Q8_0"].replace("Z", "+00:00")) - datetime.now(timezone.utc)
        assert timedelta(seconds=200) < left <= timedelta(minutes=5)
        await answered(http, "/api/chat", {**ASK, "model": "one", "keep_alive": 0.2, "stream": False})
        await wait_for(http, "one-Q8_0", "unloaded")
        answer = await answered(http, "/api/chat", {**ASK, "model": "one", "keep_alive": 0, "stream": False})
        assert answer["eval_count"] == 8
        assert answer["load_duration"] > 0
        await wait_for(http, "one-Q8_0", "unloaded")
        assert (await answered(http, "/api/chat", {"model": "two", "keep_alive": 0}))["done_reason"] == "unload"
        await wait_for(http, "two", "unloaded")
        status, refused = await post(http, "/api/chat", {**ASK, "model": "llama3.2"})
        assert (status, refused["error"].startswith("model 'llama3.2' not found")) == (404, True)


async def test_keys_limit_what_is_seen_and_used(folder: Path) -> None:
    keys = Keys([api_key("sk-all", name="all"), api_key("sk-one", name="one", models=("one-Q8_0",))])
    async with serve(folder, settings={"keys": keys}) as http:
        limited = {"Authorization": "Bearer sk-one"}
        status, refused = await get(http, "/api/tags")
        assert (status, "missing or invalid API key" in refused["error"]) == (401, True)
        _, seen = await get(http, "/api/tags", headers=limited)
        assert [each["name"] for each in seen["models"]] == ["one-Q8_0"]
        for path in ("/api/chat", "/api/show"):
            assert (await post(http, path, {**ASK, "model": "two"}, headers=limited))[0] in (403, 404), path
        assert (await post(http, "/api/chat", {**ASK, "model": "one:latest", "stream": False}, headers=limited))[
            0
        ] == 200
        assert (await post(http, "/api/show", {"model": "one-Q8_0"}, headers=limited))[0] == 200


def test_a_stream_that_fails_ends_with_an_error(server: ChatServer, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = server.fail_in_midstream(monkeypatch)
    with server.stream("/api/chat", {**ASK, "options": {"num_predict": 50, "ignore_eos": True}}) as answer:
        first = json.loads(answer.readline())
        go_on.set()
        *_, last = [json.loads(line) for line in answer]
    assert first["done"] is False
    assert list(last) == ["error"]


async def test_a_client_that_disconnects_frees_its_cells(tiny_llama: Path) -> None:
    async with http_of(tiny_llama, n_ctx=4096, n_parallel=2, n_threads=1) as http:
        async with http.post("/api/chat", json={**ASK, "options": {"num_predict": -1, "ignore_eos": True}}) as answer:
            await answer.content.readline()
        for _ in range(200):
            _, stats = await get(http, "/stats")
            if stats["running"] == 0:
                return
            await asyncio.sleep(0.05)
        raise AssertionError(stats)
