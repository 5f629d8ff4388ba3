"""llama-server's paths, and what it shows beside OpenAI's fields: each answer is that of the other path."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest

from cppbatch.server.settings import ServerSettings
from tests.support.http_client import Http, answered, http_of

Json = dict[str, Any]
HELLO = [{"role": "user", "content": "Hello"}]
CHANGING = {"id", "created", "created_at", "completed_at", "usage", "timings", "output"}
DOCUMENTS = ["a cat sat", "and", "the dog"]


async def opened(model: Path, **settings: Any) -> AsyncIterator[Http]:
    async with http_of(model, ServerSettings(**settings), n_ctx=512, n_parallel=2, n_threads=1) as http:
        yield http


@pytest.fixture
async def http(tiny_llama: Path) -> AsyncIterator[Http]:
    async for client in opened(tiny_llama):
        yield client


@pytest.fixture
async def reranker(tiny_reranker: Path) -> AsyncIterator[Http]:
    async for client in opened(tiny_reranker):
        yield client


@pytest.fixture
async def encoder(tiny_encoder: Path) -> AsyncIterator[Http]:
    async with http_of(tiny_encoder, n_ctx=512, n_parallel=2, n_threads=1, pooling="mean") as client:
        yield client


async def refused(http: Http, path: str, body: object) -> tuple[int, str]:
    async with http.post(path, json=body) as answer:
        return answer.status, (await answer.json())["error"]["param"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/chat/completions", {"messages": HELLO, "max_tokens": 3, "temperature": 0}),
        ("/responses", {"input": "Hello", "max_output_tokens": 3, "temperature": 0}),
        ("/chat/completions/input_tokens", {"messages": HELLO}),
        ("/responses/input_tokens", {"input": "Hello"}),
    ],
)
async def test_a_path_without_v1_gives_the_same_answer(http: Http, path: str, body: Json) -> None:
    with_v1, without = await answered(http, f"/v1{path}", body), await answered(http, path, body)
    assert with_v1.keys() == without.keys()
    for name in with_v1.keys() - CHANGING - {"choices"}:
        assert with_v1[name] == without[name]


async def test_models_have_both_paths(http: Http) -> None:
    async with http.get("/models") as without, http.get("/v1/models") as with_v1:
        assert await without.json() == await with_v1.json()


@pytest.mark.parametrize("path", ["/rerank", "/reranking", "/v1/reranking"])
async def test_rerankers_have_llama_servers_paths(reranker: Http, path: str) -> None:
    body = {"query": "cat", "documents": DOCUMENTS, "top_n": 2}
    other, known = await answered(reranker, path, body), await answered(reranker, "/v1/rerank", body)
    for one, same in zip(other["results"], known["results"], strict=True):
        assert one["index"] == same["index"]
        assert one["relevance_score"] == pytest.approx(same["relevance_score"], rel=1e-5)  # computed in another batch


async def test_input_tokens_are_those_of_the_same_request(http: Http) -> None:
    chat: Json = {"messages": [{"role": "system", "content": "Be brief."}, *HELLO], "max_tokens": 1}
    counted = await answered(http, "/v1/chat/completions/input_tokens", chat)
    assert counted == {
        "object": "response.input_tokens",
        "input_tokens": (await answered(http, "/v1/chat/completions", chat))["usage"]["prompt_tokens"],
    }
    response: Json = {"input": "Hello", "instructions": "Be brief."}
    counted = await answered(http, "/v1/responses/input_tokens", response)
    asked = await answered(http, "/v1/responses", {**response, "max_output_tokens": 1})
    assert counted["input_tokens"] == asked["usage"]["input_tokens"]


async def test_openais_client_counts_input_tokens(http: Http) -> None:
    client = openai.AsyncOpenAI(base_url=str(http.make_url("/v1")), api_key="none", max_retries=0)
    counted = await client.responses.input_tokens.count(model="any", input="Hello")
    assert (counted.object, counted.input_tokens > 0) == ("response.input_tokens", True)


async def test_texts_are_ranked_in_teis_form(reranker: Http) -> None:
    whole = (await answered(reranker, "/rerank", {"query": "cat", "documents": DOCUMENTS}))["results"]
    asked: Json = {"query": "cat", "texts": DOCUMENTS}
    scores = await answered(reranker, "/rerank", asked)
    # The texts of a request may be computed in one step or in two, which rounds their scores differently.
    close = partial(pytest.approx, rel=1e-5)
    assert scores == [{"index": each["index"], "score": close(each["relevance_score"])} for each in whole]
    best, *_ = await answered(reranker, "/rerank", {**asked, "return_text": True, "top_n": 1, "truncate": True})
    assert best == {
        "index": scores[0]["index"],
        "score": close(scores[0]["score"]),
        "text": DOCUMENTS[scores[0]["index"]],
    }
    between = await answered(reranker, "/rerank", {**asked, "raw_scores": False})
    for score, raw in zip(between, scores, strict=True):
        assert score["score"] == pytest.approx(1 / (1 + math.exp(-raw["score"])), rel=1e-5)


@pytest.mark.parametrize("field", ["documents", "texts"])
@pytest.mark.parametrize("given", [[], None, 123, [1, 2, 3]])
async def test_invalid_rerank_requests_are_refused(reranker: Http, field: str, given: object) -> None:
    status, param = await refused(reranker, "/rerank", {"query": "cat", field: given})
    assert status == 400
    assert param.startswith(field) or given is None
    assert (await refused(reranker, "/rerank", {"query": "a", "texts": ["b"], "documents": ["b"]})) == (400, "texts")


@pytest.mark.parametrize("path", ["/embeddings", "/embedding"])
async def test_vectors_are_listed_in_llama_servers_form(encoder: Http, path: str) -> None:
    expected = (await answered(encoder, "/v1/embeddings", {"input": ["a b", "c"]}))["data"]
    vectors = [{"index": each["index"], "embedding": [each["embedding"]]} for each in expected]
    for field in ("input", "content"):
        for given, same in zip(await answered(encoder, path, {field: ["a b", "c"]}), vectors, strict=True):
            assert given["index"] == same["index"]
            ((one,), (other,)) = given["embedding"], same["embedding"]
            assert one == pytest.approx(other, abs=1e-5)  # computed in another batch
    (raw, _) = await answered(encoder, path, {"input": ["a b", "c"], "embd_normalize": -1})
    length = math.hypot(*raw["embedding"][0])
    assert length != pytest.approx(1, abs=1e-3)
    assert [x / length for x in raw["embedding"][0]] == pytest.approx(vectors[0]["embedding"][0], abs=1e-5)


@pytest.mark.parametrize(
    ("body", "field"),
    [({}, "input"), ({"input": "a", "embd_normalize": 101}, "embd_normalize"),
     ({"input": "a", "encoding_format": "base64"}, "encoding_format")],
)  # fmt: skip
async def test_other_forms_of_vectors_are_refused(encoder: Http, body: Json, field: str) -> None:
    assert await refused(encoder, "/embeddings", body) == (400, field)


async def test_the_fingerprint_is_in_every_object_and_changes_with_the_settings(http: Http, tiny_llama: Path) -> None:
    bodies: dict[str, Json] = {
        "/v1/chat/completions": {"messages": HELLO, "max_tokens": 2},
        "/v1/completions": {"prompt": "a", "max_tokens": 2},
    }
    found = {(await answered(http, path, body))["system_fingerprint"] for path, body in bodies.items()}
    for path, body in bodies.items():
        async with http.post(path, json={**body, "stream": True}) as answer:
            *chunks, done = (await answer.text()).removesuffix("\n\n").split("\n\n")
        assert done == "data: [DONE]"
        assert all(f'"system_fingerprint":"{next(iter(found))}"' in chunk for chunk in chunks)
    (fingerprint,) = found
    assert fingerprint.startswith("b")
    async for other in opened(tiny_llama, chat_template="{{ messages }}"):
        answer = await answered(other, "/v1/completions", {"prompt": "a", "max_tokens": 1})
        assert answer["system_fingerprint"] != fingerprint
    async with http_of(tiny_llama, ServerSettings(), n_ctx=512, n_parallel=2, n_threads=1, rope_freq_base=9) as other:
        answer = await answered(other, "/v1/completions", {"prompt": "a", "max_tokens": 1})
        assert answer["system_fingerprint"] != fingerprint
