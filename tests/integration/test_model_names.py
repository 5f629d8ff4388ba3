"""A server answers to any model name, and says its own in the answers of every API; --strict-model refuses others."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import click
import pytest
from aiohttp.test_utils import TestClient, TestServer

from cppbatch import LocalEngine
from cppbatch.cli.server_options import server_options
from cppbatch.server.app import create_app
from cppbatch.server.settings import ServerSettings
from tests.support.http_client import Http, get, post

Json = dict[str, Any]
HELLO = [{"role": "user", "content": "Hello"}]

GENERATING: dict[str, Json] = {
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 2},
    "/v1/completions": {"prompt": "ab", "max_tokens": 2},
    "/v1/responses": {"input": "ab", "max_output_tokens": 2},
    "/v1/messages": {"messages": HELLO, "max_tokens": 2},
    "/completion": {"prompt": "ab", "n_predict": 2},
}


@asynccontextmanager
async def serve(model: Path, pooling: str | None = None, **settings: Any) -> AsyncIterator[Http]:
    engine: Json = {"pooling": pooling} if pooling else {}
    async with LocalEngine(model, n_ctx=512, n_parallel=2, n_threads=1, **engine) as client:
        app = create_app(client, ServerSettings(**settings))
        async with TestClient(TestServer(app)) as http:
            yield http


async def test_any_name_is_answered_by_every_api_with_the_models_own_name(tiny_llama: Path) -> None:
    async with serve(tiny_llama) as http:
        for path, body in GENERATING.items():
            for name in ("gpt-9", tiny_llama.stem):
                status, answer = await post(http, path, {**body, "model": name})
                assert (status, answer["model"]) == (200, "tiny-llama"), path
        assert (await post(http, "/v1/messages/count_tokens", {"messages": HELLO, "model": "claude-9"}))[0] == 200


async def test_streams_have_the_models_own_name_too(tiny_llama: Path) -> None:
    async with serve(tiny_llama, aliases=("shown",)) as http:
        for path, body in GENERATING.items():
            async with http.post(path, json={**body, "model": "gpt-9", "stream": True}) as answer:
                text = await answer.text()
            assert '"model":"shown"' in text, path
            assert "gpt-9" not in text, path


async def test_the_alphabetically_first_alias_replaces_the_name(tiny_llama: Path) -> None:
    async with serve(tiny_llama, aliases=("tiny", "fim", "code"), tags=("chat", "small")) as http:
        for path, body in GENERATING.items():
            assert (await post(http, path, {**body, "model": "tiny"}))[1]["model"] == "code", path
        _, listed = await get(http, "/v1/models")
        (model,) = listed["data"]
        assert (model["id"], model["aliases"], model["tags"]) == ("code", ["code", "fim", "tiny"], ["chat", "small"])
        assert (await get(http, "/props"))[1]["model_alias"] == "code"
        for name in ("code", "fim", "tiny-llama"):
            assert (await get(http, f"/v1/models/{name}"))[1]["id"] == "code"


async def test_vectors_and_scores_have_the_same_name(tiny_encoder: Path, tiny_reranker: Path) -> None:
    async with serve(tiny_encoder, "mean", aliases=("vectors",)) as http:
        _, answer = await post(http, "/v1/embeddings", {"input": "ab", "model": "text-embedding-3-small"})
        assert answer["model"] == "vectors"
    async with serve(tiny_reranker, aliases=("scores",)) as http:
        _, answer = await post(http, "/v1/rerank", {"query": "a", "documents": ["b"], "model": "rerank-3"})
        assert answer["model"] == "scores"


async def test_strict_names_refuse_every_other_one(tiny_llama: Path) -> None:
    async with serve(tiny_llama, aliases=("mine",), strict_model=True) as http:
        for path, body in {**GENERATING, "/v1/messages/count_tokens": {"messages": HELLO}}.items():
            status, answer = await post(http, path, {**body, "model": "gpt-9"})
            assert status == 404, path
            assert "'gpt-9' not found; available: 'tiny-llama', 'mine'" in answer["error"]["message"]
            if "messages" not in path:
                assert answer["error"]["code"] == "model_not_found"
            for name in ("mine", "tiny-llama"):
                assert (await post(http, path, {**body, "model": name}))[0] == 200


async def test_a_model_of_another_name_is_not_found_by_it(tiny_llama: Path) -> None:
    async with serve(tiny_llama) as http:
        status, answer = await get(http, "/v1/models/gpt-9")
        assert (status, answer["error"]["code"]) == (404, "model_not_found")


async def test_every_404_has_a_code(tiny_llama: Path) -> None:
    async with serve(tiny_llama) as http:
        for path in ("/v1/nothing", "/nothing", "/v1/models/a/b", "/v1/files/file-1", "/v1/batches/batch_1"):
            status, answer = await get(http, path)
            assert answer["error"]["code"], path
            assert status in (404, 503), path  # 503: this server stores no files


@pytest.mark.parametrize(
    ("given", "aliases"), [(["-a", "b,a"], ("b", "a")), (["--alias", "a", "--alias", "c, d,"], ("a", "c", "d"))]
)
def test_aliases_are_separated_by_commas(given: list[str], aliases: tuple[str, ...]) -> None:
    found: list[ServerSettings] = []

    @click.command()
    @server_options
    def command(settings: ServerSettings, **_: object) -> None:
        found.append(settings)

    command.main([*given, "--tags", "x,y"], standalone_mode=False)
    assert (found[0].aliases, found[0].tags, found[0].strict_model) == (aliases, ("x", "y"), False)
