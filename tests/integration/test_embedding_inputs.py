"""`/v1/embeddings`: what an input may be, in OpenAI's form and in llama-server's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cppbatch import LocalEngine
from tests.support.fixtures import engine_of
from tests.support.http_client import Http, http_of, http_to, post

engine = engine_of(model="tiny_encoder", n_ctx=512)


async def embed(http: Http, value: object) -> tuple[int, Any]:
    return await post(http, "/v1/embeddings", {"input": value})


PART = {"type": "text", "text": "some words"}


@pytest.mark.parametrize(
    ("value", "n"),
    [
        ("", 1),
        ("some words", 1),
        ([12, 34, 56], 1),
        ([12, 34, "some words", 56], 1),
        (["some words", "more"], 2),
        (["some words", [12, 34]], 2),
        ([[12, 34, 56], [12, "some words", 34]], 2),
        ({"prompt_string": "some words"}, 1),
        ({"content": [PART]}, 1),
        (["more", {"prompt_string": "some"}, {"content": [PART, PART]}], 3),
    ],
)
async def test_texts_and_token_ids_may_be_mixed(http: Http, value: object, n: int) -> None:
    status, body = await embed(http, value)
    assert status == 200, body
    assert [each["index"] for each in body["data"]] == list(range(n))
    assert all(len(each["embedding"]) > 1 for each in body["data"])


async def test_the_forms_of_one_text_have_one_vector(http: Http) -> None:
    halves = [{"type": "text", "text": "some "}, {"type": "text", "text": "words"}]
    _, body = await embed(http, ["some words", {"prompt_string": "some words"}, {"content": halves}])
    first, *others = [each["embedding"] for each in body["data"]]
    assert all(other == pytest.approx(first, abs=1e-3) for other in others)


@pytest.mark.parametrize(
    ("value", "field"),
    [
        ([], "input"),
        (5, "input"),
        ([["a"], 5.5], "input[1]"),
        ([12, 10**9], "input[1]"),
        (["a", [12, 10**9]], "input[1][1]"),
        ([12, -1], "input[1]"),
        (["a", [12, -1]], "input[1][1]"),
        (["a", "a", []], "input[2]"),
        ({"content": "some words"}, "input.content"),
        (["a", {"content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "input[1].content[0]"),
        ({"nothing": 1}, "input"),
    ],
)
async def test_any_other_input_is_refused_with_its_name(http: Http, value: object, field: str) -> None:
    status, body = await embed(http, value)
    assert (status, body["error"]["param"]) == (400, field), body


async def test_without_pooling_this_api_has_no_answer(tiny_encoder: Path) -> None:
    async with http_of(tiny_encoder, n_ctx=512, n_parallel=4, n_threads=1, pooling="none") as http:
        status, body = await embed(http, "some words")
        assert status == 400
        assert "pooling none" in body["error"]["message"]


async def test_without_pooling_llama_servers_path_returns_a_vector_for_each_token(tiny_encoder: Path) -> None:
    async with (
        LocalEngine(tiny_encoder, n_ctx=512, n_parallel=4, n_threads=1, pooling="none") as engine,
        http_to(engine) as http,
    ):
        for fields, is_length_1 in (({}, False), ({"embd_normalize": -1}, False), ({"embd_normalize": 2}, True)):
            async with http.post("/embeddings", json={"input": ["some words", [12, 34]], **fields}) as answer:
                assert answer.status == 200
                first, second = await answer.json()
            assert len(first["embedding"]) == len(await engine.tokenize("some words"))
            assert len(second["embedding"]) == 2
            assert all(len(vector) == engine.info.n_embd for vector in first["embedding"])
            lengths = [sum(x * x for x in vector) for vector in first["embedding"]]
            assert all(abs(length - 1) < 1e-3 for length in lengths) == is_length_1
