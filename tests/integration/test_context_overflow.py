"""A prompt that is longer than the context, in every API, with the error that llama-server's and its clients expect."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from cppbatch import EngineProcess, LocalEngine
from cppbatch.engine.request import GenerationRequest
from cppbatch.errors import InvalidRequest
from cppbatch.jobs.job_request import JobRequest
from cppbatch.server.api.batches.handler import BatchRequestHandler
from cppbatch.server.http.error_formats import ErrorResponse
from cppbatch.server.models.served import OneModel
from cppbatch.server.settings import ServerSettings
from tests.support.http_client import Http, http_of

N_CTX = 256
LONG = [5] * 300
TEXT = "Hello world. " * 200
CHAT = [{"role": "user", "content": TEXT}]
OPENAI: dict[str, tuple[dict[str, Any], str]] = {
    "/v1/completions": ({"prompt": LONG}, "prompt"),
    "/v1/chat/completions": ({"messages": CHAT}, "messages"),
    "/v1/responses": ({"input": TEXT}, "input"),
    "/completion": ({"prompt": LONG}, "prompt"),
    "/generate": ({"prompt": LONG}, "prompt"),
}
"""Paths with too long a request, and the field at fault."""
SHORT: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hello", "max_tokens": 10**6},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello"}], "max_completion_tokens": 10**6},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 10**6},
    "/v1/messages": {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 10**6},
    "/completion": {"prompt": "Hello", "n_predict": 10**6},
    "/generate": {"prompt": "Hello", "max_tokens": 10**6},
}
"""Paths with a short prompt, and a request for more tokens than the context holds."""


@pytest.fixture
async def http(tiny_llama: Path) -> AsyncIterator[Http]:
    sizes = {"n_ctx": N_CTX, "n_parallel": 2, "n_threads": 1}
    async with http_of(tiny_llama, ServerSettings(aliases=("tiny",)), kv_layout="unified", **sizes) as client:
        yield client


async def refusal(http: Http, path: str, body: dict[str, Any]) -> dict[str, Any]:
    async with http.post(path, json=body) as answer:
        assert answer.status == 400
        assert answer.content_type == "application/json"
        error: dict[str, Any] = (await answer.json())["error"]
        return error


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", OPENAI)
async def test_a_long_prompt_is_refused_as_openai_and_as_llama_server_do(http: Http, path: str, stream: bool) -> None:
    body, field = OPENAI[path]
    error = await refusal(http, path, {**body, "stream": stream})
    assert error["code"] == "context_length_exceeded"
    assert error["type"] == "exceed_context_size_error"
    assert (error["param"], error["n_ctx"]) == (field, N_CTX)
    n = error["n_prompt_tokens"]
    assert n == 300 if "prompt" in body else n > N_CTX
    assert error["message"].startswith(
        f"This model's maximum context length is {N_CTX} tokens. However, your {field} resulted in {n} tokens, which "
        f"exceeds the available context size. Please reduce the length of the {field}"
    )
    assert "raise n_ctx (-c)" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_long_conversation_is_refused_as_anthropic_does(http: Http, stream: bool) -> None:
    body = {"model": "tiny", "messages": CHAT, "max_tokens": 5, "stream": stream}
    error = await refusal(http, "/v1/messages", body)
    n = error["n_prompt_tokens"]
    assert error == {
        "type": "invalid_request_error",
        "message": f"prompt is too long: {n} tokens > {N_CTX} maximum",
        "n_prompt_tokens": n,
        "n_ctx": N_CTX,
    }
    assert n > N_CTX


async def test_an_input_of_an_embedding_model_is_too_large_in_both_servers_words(tiny_encoder: Path) -> None:
    async with http_of(tiny_encoder, n_batch=64, n_ubatch=64, n_threads=1) as client:
        error = await refusal(client, "/v1/embeddings", {"input": LONG})
    assert (error["code"], error["n_prompt_tokens"], error["n_ctx"]) == ("context_length_exceeded", 300, 64)
    assert "maximum context length is 64 tokens" in error["message"]
    assert "resulted in 300 tokens, which is too large to process" in error["message"]


async def test_an_item_of_a_batch_that_is_too_long_has_the_same_error(http: Http) -> None:
    body = {"prompts": [[5, 6], {"prompt": LONG}], "max_tokens": 2}
    async with http.post("/generate/batch", json=body) as answer:
        results = (await answer.json())["results"]
    assert "error" not in results[0]
    error = results[1]["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompts[1].prompt")
    assert (error["n_prompt_tokens"], error["n_ctx"]) == (300, N_CTX)


async def test_a_text_too_long_to_be_tokenised_gives_the_least_number_of_its_tokens(http: Http) -> None:
    error = await refusal(http, "/v1/completions", {"prompt": "word " * 100_000})
    assert error["n_prompt_tokens"] > N_CTX
    assert f"resulted in {error['n_prompt_tokens']} tokens or more, which exceeds" in error["message"]


async def test_more_messages_than_the_context_has_tokens_are_an_overflow_too(http: Http) -> None:
    error = await refusal(http, "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}] * 300})
    assert (error["type"], error["n_prompt_tokens"], error["n_ctx"]) == ("exceed_context_size_error", 300, N_CTX)


async def test_a_prediction_that_is_too_long_is_not_a_prompt_overflow(http: Http) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "prediction": {"type": "content", "content": TEXT}}
    error = await refusal(http, "/v1/chat/completions", body)
    assert (error["type"], error["code"]) == ("invalid_request_error", None)
    assert "n_ctx" not in error


@pytest.mark.parametrize("path", SHORT)
async def test_max_tokens_over_what_fits_is_clamped(http: Http, path: str) -> None:
    async with http.post(path, json={**SHORT[path], "ignore_eos": True}) as answer:
        body = await answer.json()
        assert answer.status == 200, body
    if path == "/completion":
        assert body["stop_type"] == "limit"
        assert body["truncated"]
        assert body["tokens_evaluated"] + body["tokens_predicted"] == N_CTX
    elif path == "/v1/messages":
        assert body["stop_reason"] == "model_context_window_exceeded"
    elif path == "/v1/responses":
        assert body["incomplete_details"]["reason"] == "max_output_tokens"
    else:
        last = body["choices"][0] if "choices" in body else body
        assert last["finish_reason"] == "length"


async def test_a_worker_tells_how_long_the_prompt_was(tiny_llama: Path) -> None:
    async with EngineProcess(tiny_llama, n_ctx=N_CTX, n_parallel=1, n_threads=1) as engine:
        await engine.loaded()
        with pytest.raises(InvalidRequest) as refused:
            await engine.check(GenerationRequest(id="a", prompt=LONG))
    overflow = refused.value.overflow
    assert overflow is not None
    assert (overflow.n_prompt_tokens, overflow.n_ctx) == (300, N_CTX)


async def test_a_request_of_a_batch_job_has_the_same_error(tiny_llama: Path) -> None:
    async with LocalEngine(tiny_llama, n_ctx=N_CTX, n_parallel=2, kv_layout="unified", n_threads=1) as engine:
        handle = BatchRequestHandler(OneModel.of(engine, ServerSettings()))
        response = await handle(
            JobRequest(line=1, custom_id="a", url="/v1/chat/completions", body={"messages": CHAT}, content_hash=0)
        )
    assert response.status == 400
    assert isinstance(response.body, ErrorResponse)
    assert (response.body.error.code, response.body.error.param) == ("context_length_exceeded", "messages")
