"""What llama-server's flags for requests, chats and the network do, over HTTP."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from cppbatch import LocalEngine
from cppbatch.errors import ConfigError
from cppbatch.server.address import Address
from cppbatch.server.app import create_app
from cppbatch.server.auth.rules import Keys
from cppbatch.server.listener import listen
from cppbatch.server.observe.log_setup import set_up
from cppbatch.server.settings import ServerSettings
from tests.support.chat_families import TEMPLATES
from tests.support.fixtures import engine_of
from tests.support.http_client import Http, answered, http_of, http_to

Json = dict[str, Any]
ENGINE: Json = {"n_ctx": 1024, "n_parallel": 4, "n_threads": 1}
HELLO = [{"role": "user", "content": "hello"}]
DIGITS = 'root ::= "7" [0-9]{4}'

engine = engine_of(LocalEngine)


async def told(engine: LocalEngine, body: Json, path: str = "/completion", **settings: Any) -> Any:
    """The answer of a server with these settings."""
    async with http_to(engine, ServerSettings(**settings)) as http:
        return await answered(http, path, {"n_predict": 12, "max_tokens": 12, "temperature": 0, **body})


# --- defaults of requests --------------------------------------------------------------------------------------------


async def test_a_grammar_of_the_server_is_for_requests_without_a_constraint(engine: LocalEngine) -> None:
    defaults: Json = {"sampling_defaults": {"grammar": DIGITS}}
    answer = await told(engine, {"prompt": "a"}, **defaults)
    assert answer["content"][0] == "7"
    assert answer["content"].isdigit()
    chat = await told(engine, {"messages": HELLO}, "/v1/chat/completions", **defaults)
    assert chat["choices"][0]["message"]["content"].isdigit()
    own = await told(engine, {"prompt": "a", "grammar": 'root ::= "x"'}, **defaults)
    assert own["content"] == "x"
    schema = await told(engine, {"prompt": "a", "json_schema": {"const": 5}}, **defaults)
    assert json.loads(schema["content"]) == 5
    format = {"type": "json_schema", "json_schema": {"schema": {"const": "b"}}}
    formatted = await told(engine, {"messages": HELLO, "response_format": format}, "/v1/chat/completions", **defaults)
    assert json.loads(formatted["choices"][0]["message"]["content"]) == "b"


async def test_a_schema_of_the_server_is_for_requests_without_a_constraint(engine: LocalEngine) -> None:
    answer = await told(engine, {"prompt": "a"}, sampling_defaults={"json_schema": '{"const": 12}'})
    assert json.loads(answer["content"]) == 12


async def test_the_stop_texts_of_the_server_are_for_requests_without_them(engine: LocalEngine) -> None:
    whole = (await told(engine, {"prompt": "a"}))["content"]
    stop = whole[4:6]
    cut = await told(engine, {"prompt": "a"}, sampling_defaults={"stop": [stop]})
    assert cut["content"] == whole[: whole.index(stop)]
    assert cut["stopping_word"] == stop
    own = await told(engine, {"prompt": "a", "stop": ["never"]}, sampling_defaults={"stop": [stop]})
    assert own["content"] == whole


async def test_a_bias_of_the_server_changes_which_token_comes_first(engine: LocalEngine) -> None:
    usual = await told(engine, {"prompt": "a", "return_tokens": True, "n_predict": 1})
    (first,) = usual["tokens"]
    biased = await told(
        engine,
        {"prompt": "a", "return_tokens": True, "n_predict": 1},
        sampling_defaults={"logit_bias": {str(first): -100.0}},
    )
    assert biased["tokens"] != [first]


async def test_control_tokens_are_shown_if_the_server_says_so(engine: LocalEngine) -> None:
    body: Json = {"prompt": "a", "logit_bias": [[1, 100]], "n_predict": 2}
    shown = await told(engine, body, sampling_defaults={"skip_special_tokens": False})
    assert (await told(engine, body))["content"] == ""
    assert shown["content"] == 2 * engine.info.bos


# --- chats -----------------------------------------------------------------------------------------------------------


THINKING = TEMPLATES["generic"] + "<think>"


async def reply(engine: LocalEngine, text: str, body: Json | None = None, **settings: Any) -> Json:
    """The message of a chat whose model says `text`."""
    request = {"messages": HELLO, "temperature": 0, **(body or {})}
    defaults = {"grammar": f"root ::= {json.dumps(text)}"}
    settings = {"chat_template": THINKING, "sampling_defaults": defaults, **settings}
    answer = await told(engine, {**request, "max_tokens": 100}, "/v1/chat/completions", **settings)
    message: Json = answer["choices"][0]["message"]
    return message


async def test_reasoning_stays_in_the_content_if_the_server_or_the_request_says_so(engine: LocalEngine) -> None:
    text = "hm</think>yes"
    usual = await reply(engine, text)
    assert (usual["reasoning_content"], usual["content"]) == ("hm", "yes")
    for message in (
        await reply(engine, text, reasoning_format="none"),
        await reply(engine, text, {"reasoning_format": "none"}),
        await reply(engine, text, skip_chat_parsing=True),
    ):
        assert message["content"] == text
        assert not message.get("reasoning_content")
    again = await reply(engine, text, {"reasoning_format": "auto"}, reasoning_format="none")
    assert again["content"] == "yes"


async def test_calls_stay_in_the_content_if_the_server_says_so(engine: LocalEngine) -> None:
    text = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
    template = TEMPLATES["hermes"]
    usual = await reply(engine, text, {"tools": tools}, chat_template=template)
    assert usual["tool_calls"][0]["function"]["name"] == "look"
    kept = await reply(engine, text, {"tools": tools}, chat_template=template, skip_chat_parsing=True)
    assert kept["content"] == text
    assert not kept.get("tool_calls")


async def test_a_message_comes_before_the_end_of_reasoning_that_has_used_up_its_tokens(engine: LocalEngine) -> None:
    settings: Json = {"chat_template": THINKING, "thinking_tokens": 3}
    suppressed = [i for i in range(engine.info.n_vocab) if i in (60, 91)]
    body: Json = {"messages": HELLO, "ignore_eos": True, "max_tokens": 60, "suppress_tokens": suppressed}

    async def reasoning(body: Json, **more: Any) -> str:
        answer = await told(engine, body, "/v1/chat/completions", **settings, **more)
        return str(answer["choices"][0]["message"]["reasoning_content"])

    usual = await reasoning(body)
    assert await reasoning(body, thinking_message=" Enough.") == f"{usual} Enough."
    of_request = body | {"reasoning_budget_message": " Stop."}
    assert await reasoning(of_request, thinking_message=" Enough.") == f"{usual} Stop."


async def test_a_last_message_of_the_assistant_is_continued_unless_the_server_says_otherwise(
    engine: LocalEngine,
) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "Once upon"}]

    async def prompt(**settings: Any) -> str:
        answer = await told(
            engine, {"messages": messages}, "/apply-template", chat_template=TEMPLATES["generic"], **settings
        )
        return str(answer["prompt"])

    assert (await prompt()).endswith("Once upon")
    assert not (await prompt(prefill_assistant=False)).endswith("Once upon")


# --- other endpoints -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("norm", "order"), [(-1, None), (0, np.inf), (1, 1), (2, 2), (3, 3)])
async def test_embeddings_have_the_norm_of_the_server_unless_the_request_has_one(
    tiny_llama: Path, norm: int, order: float | None
) -> None:
    config: Json = {"n_ctx": 256, "n_parallel": 2, "n_threads": 1, "pooling": "mean"}
    async with http_of(tiny_llama, ServerSettings(embd_normalize=norm), **config) as http:
        (found,) = await answered(http, "/embedding", {"input": "abc"})
        (as_computed,) = await answered(http, "/embedding", {"input": "abc", "embd_normalize": -1})
        (of_request,) = await answered(http, "/embedding", {"input": "abc", "embd_normalize": 2})
        openai = await answered(http, "/v1/embeddings", {"input": "abc"})
    vector, raw = np.array(found["embedding"][0]), np.array(as_computed["embedding"][0])
    length = 1.0 if order is None else np.linalg.norm(raw, order) / (32_760 if norm == 0 else 1)
    assert np.allclose(vector, raw / length, rtol=1e-4)
    assert np.isclose(np.linalg.norm(of_request["embedding"][0]), 1)
    assert np.allclose(openai["data"][0]["embedding"], vector, rtol=1e-4)


def test_a_norm_without_a_meaning_is_refused() -> None:
    with pytest.raises(ConfigError, match="--embd-normalize is -2"):
        ServerSettings(embd_normalize=-2)


async def test_prompts_are_written_to_a_folder(engine: LocalEngine, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "prompts"
    await told(engine, {"prompt": "the first"}, prompts_dir=folder)
    await told(engine, {"messages": HELLO}, "/v1/chat/completions", prompts_dir=folder)
    first, second = sorted(folder.iterdir())
    assert first.read_text() == "<s>the first"
    assert "hello" in second.read_text()


# --- network ---------------------------------------------------------------------------------------------------------


ORIGIN = {"Origin": "https://app.example"}
PREFLIGHT = {**ORIGIN, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "x-a, x-b"}


@pytest.mark.parametrize(
    ("settings", "methods", "headers", "credentials"),
    [
        ({}, "GET, POST, DELETE, OPTIONS", "x-a, x-b", "true"),
        ({"cors_methods": "GET", "cors_headers": "x-a"}, "GET", "x-a", "true"),
        ({"cors_credentials": False}, "GET, POST, DELETE, OPTIONS", "x-a, x-b", None),
        ({"cors_credentials": False, "cors_origins": ("*",)}, "GET, POST, DELETE, OPTIONS", "x-a, x-b", "true"),
    ],
)
async def test_pages_of_other_origins_may_use_what_the_server_names(
    engine: LocalEngine, settings: Json, methods: str, headers: str, credentials: str | None
) -> None:
    settings = {"cors_origins": ("https://app.example",), **settings}
    async with (
        http_to(engine, ServerSettings(**settings)) as http,
        http.options("/v1/models", headers=PREFLIGHT) as answer,
    ):
        assert answer.headers["Access-Control-Allow-Origin"] == "https://app.example"
        assert answer.headers["Access-Control-Allow-Methods"] == methods
        assert answer.headers["Access-Control-Allow-Headers"] == headers
        assert answer.headers.get("Access-Control-Allow-Credentials") == credentials


@pytest.fixture
async def site(engine: LocalEngine, tmp_path: Path) -> AsyncIterator[Http]:
    (tmp_path / "www" / "more").mkdir(parents=True)
    (tmp_path / "www" / "index.html").write_text("my page")
    (tmp_path / "www" / "more" / "a.js").write_text("let a")
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "www" / "link").symlink_to(tmp_path / "secret")
    settings = ServerSettings(static_path=tmp_path / "www", keys=Keys(["k"]))
    async with http_to(engine, settings) as http:
        yield http


async def test_files_of_a_folder_are_served_in_place_of_the_web_page(site: Http) -> None:
    key = {"Authorization": "Bearer k"}

    async def get(path: str, **headers: str) -> tuple[int, str]:
        async with site.get(path, headers=headers) as answer:
            return answer.status, await answer.text()

    assert await get("/") == (200, "my page")  # without a key, as in llama-server
    assert await get("/more/a.js", **key) == (200, "let a")
    assert (await get("/more/a.js"))[0] == 401
    for path in ("/nosuch", "/more", "/..%2fsecret", "/link", "/%00", "/page/app.js", "/" + "x" * 300):
        assert (await get(path, **key))[0] == 404, path
    assert (await get("/v1/models", **key))[0] == 200


async def test_all_paths_are_below_the_prefix(engine: LocalEngine) -> None:
    app = create_app(engine, ServerSettings())
    address = Address(port=0, prefix="/my/llm")
    async with await listen(app, address, max_open=9, idle_timeout=9) as listener, aiohttp.ClientSession() as session:
        assert listener.url.endswith("/my/llm")
        root = listener.url.removesuffix("/my/llm")
        for path, status in (
            ("/my/llm/health", 200), ("/my/llm/v1/models", 200), ("/my/llm", 200), ("/my/llm/", 200),
            ("/my/llm/page/app.js", 200), ("/my/llm/nosuch", 404), ("/health", 404), ("/", 404),
            ("/my/llmx/health", 404),
        ):  # fmt: skip
            async with session.get(root + path) as answer:
                assert answer.status == status, path
        body = {"prompt": "a", "max_tokens": 1}
        async with session.post(f"{root}/my/llm/v1/completions?x=1", json=body) as answer:
            assert answer.status == 200


@pytest.mark.parametrize("prefix", ["api", "/api/", "/", "/a b", "/a?b"])
def test_a_prefix_that_is_not_a_path_is_refused(prefix: str) -> None:
    with pytest.raises(ConfigError, match="--api-prefix is"):
        Address(prefix=prefix)


async def test_two_servers_listen_on_a_port_if_both_reuse_it(engine: LocalEngine) -> None:
    async with await listen(create_app(engine), Address(port=0, reuse_port=True), max_open=9, idle_timeout=9) as one:
        port = int(one.url.rpartition(":")[2])
        async with await listen(create_app(engine), Address(port=port, reuse_port=True), max_open=9, idle_timeout=9):
            pass
        with pytest.raises(ConfigError, match="cannot listen"):
            await listen(create_app(engine), Address(port=port), max_open=9, idle_timeout=9)


async def test_a_server_listens_on_a_unix_socket(engine: LocalEngine, tmp_path: Path) -> None:
    path = str(tmp_path / "llm.sock")
    address = Address(hosts=(path, "127.0.0.1"), port=0)
    async with await listen(create_app(engine), address, max_open=9, idle_timeout=9) as listener:
        assert listener.url == f"--unix-socket {path} http://localhost"
        assert listener.urls[1].startswith("http://127.0.0.1:")
        assert listener.is_private
        body = {"prompt": "a", "max_tokens": 2, "stream": True}
        async with (
            aiohttp.ClientSession(connector=aiohttp.UnixConnector(path)) as session,
            session.post("http://localhost/v1/completions", json=body) as answer,
        ):
            assert answer.status == 200
            assert (await answer.text()).endswith("data: [DONE]\n\n")
    with pytest.raises(ConfigError, match=r"cannot listen on .*nosuch/llm\.sock"):
        await listen(
            create_app(engine), Address(hosts=(str(tmp_path / "nosuch/llm.sock"),)), max_open=9, idle_timeout=9
        )


# --- log -------------------------------------------------------------------------------------------------------------


def test_the_log_is_also_appended_to_a_file_or_off(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    file = tmp_path / "server.log"
    try:
        for format in ("text", "json"):
            set_up(format, file=file)
            logging.getLogger("cppbatch.server").warning("it happens")
        set_up("text", level="off")
        logging.getLogger("cppbatch.server").critical("silence")
    finally:
        for handler in set(root.handlers) - set(before[0]):
            handler.close()
        root.handlers[:], root.level = before
    text, line = file.read_text().splitlines()
    assert text.endswith("WARNING cppbatch.server: it happens")
    assert json.loads(line)["message"] == "it happens"
    assert "silence" not in capfd.readouterr().err
    with pytest.raises(ConfigError, match=r"--log-file .* cannot be written"):
        set_up("text", file=tmp_path)
