"""What llama-server's clients change and watch: scales of adapters, properties, slots, metrics."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from cppbatch.server.settings import ServerSettings
from tests.support.http_client import Http, get, http_of, post
from tests.support.lora_files import write_lora

Json = dict[str, Any]
ASKED: Json = {"prompt": "abc", "n_predict": 16, "temperature": 0, "ignore_eos": True}


@asynccontextmanager
async def serve(model: Path, engine: Json | None = None, **settings: Any) -> AsyncIterator[Http]:
    sizes: Json = {"n_ctx": 512, "n_parallel": 2, "n_threads": 1, "spec": "off"}
    async with http_of(model, ServerSettings(**settings), **{**sizes, **(engine or {})}) as http:
        yield http


async def text_of(http: Http, **fields: Any) -> str:
    status, answer = await post(http, "/completion", ASKED | fields)
    assert status == 200, answer
    return str(answer["content"])


async def test_posted_scales_are_those_of_later_requests_without_their_own(tiny_llama: Path, tmp_path: Path) -> None:
    files = [write_lora(tmp_path / f"{name}.gguf", seed=seed) for seed, name in ((1, "loud"), (2, "calm"))]
    async with serve(tiny_llama, {"lora": ((str(files[0]), 0.5), (str(files[1]), 1.0))}) as http:

        async def scales() -> list[float]:
            return [adapter["scale"] for adapter in (await get(http, "/lora-adapters"))[1]]

        assert await scales() == [0.5, 1.0]
        first = await text_of(http)
        assert await post(http, "/lora-adapters", [{"id": 0, "scale": 4.0}]) == (200, {"success": True})
        assert await scales() == [4.0, 0.0]  # the others are off
        changed = await text_of(http)
        assert changed == await text_of(http, lora=[{"id": 0, "scale": 4.0}])
        assert changed != first == await text_of(http, lora=[{"id": 0, "scale": 0.5}, {"id": 1, "scale": 1.0}])
        chosen: Json = {"prompt": "abc", "max_tokens": 16, "temperature": 0, "ignore_eos": True}
        assert (await post(http, "/v1/completions", chosen))[1]["choices"][0]["text"] == changed
        assert (await post(http, "/generate", chosen))[1]["text"] == changed
        await post(http, "/lora-adapters", [])
        assert await text_of(http) == await text_of(http, lora=[])


@pytest.mark.parametrize(
    ("body", "field"),
    [({}, "body"), ([{"id": 1, "scale": 1}], "lora"), ([{"id": 0, "scale": 1e30}], "lora"), ([{"id": 0}], "[0]"),
     ([{"id": 0, "scale": 1}, {"id": 0, "scale": 2}], "lora[1].id")],
)  # fmt: skip
async def test_scales_that_cannot_be_set_change_nothing(
    tiny_llama: Path, tmp_path: Path, body: object, field: str
) -> None:
    adapter = write_lora(tmp_path / "loud.gguf", seed=1)
    async with serve(tiny_llama, {"lora": ((str(adapter), 0.5),)}) as http:
        status, answer = await post(http, "/lora-adapters", body)
        assert (status, answer["error"]["param"]) == (400, field)
        assert (await get(http, "/lora-adapters"))[1][0]["scale"] == 0.5


async def test_props_are_posted_where_that_is_allowed(tiny_llama: Path) -> None:
    async with serve(tiny_llama) as http:
        status, answer = await post(http, "/props", {})
        assert (status, answer["error"]["type"]) == (501, "not_supported_error")
        assert "--props" in answer["error"]["message"]
        assert (await get(http, "/props"))[1]["endpoint_props"] is False
    async with serve(tiny_llama, props=True) as http:
        assert await post(http, "/props", {}) == (200, {"success": True})
        assert (await post(http, "/props", {"chat_template": "x"}))[0] == 400  # not ignored
        assert (await get(http, "/props"))[1]["endpoint_props"] is True


# --- metrics ----------------------------------------------------------------------------------------------------------

COUNTERS = set(
    "prompt_tokens_total prompt_tokens_cached_total prompt_seconds_total tokens_predicted_total n_decode_total "
    "tokens_predicted_seconds_total n_tokens_max spec_decode_num_draft_tokens_total spec_decode_num_drafts_total "
    "spec_decode_num_accepted_tokens_total".split()
)
GAUGES = set(
    "prompt_tokens_seconds predicted_tokens_seconds requests_processing requests_deferred "
    "n_busy_slots_per_decode".split()
)


async def metrics_of(http: Http) -> dict[str, tuple[str, float]]:
    """Type and value of each of llama-server's metrics."""
    async with http.get("/metrics") as answer:
        assert int(answer.headers["Process-Start-Time-Unix"]) > 0
        lines = (await answer.text()).splitlines()
    kinds = dict(line.split()[2:] for line in lines if line.startswith("# TYPE llamacpp:"))
    values = dict(line.split() for line in lines if line.startswith("llamacpp:"))
    assert kinds.keys() == values.keys()
    assert any(line.startswith("cppbatch_") for line in lines)
    return {name.removeprefix("llamacpp:"): (kinds[name], float(value)) for name, value in values.items()}


async def test_metrics_have_llama_servers_names_and_agree_with_its_timings(tiny_llama: Path) -> None:
    async with serve(tiny_llama) as http:
        timings: list[Json] = []
        for n_predict in (1, 4, 16):
            _, answer = await post(
                http,
                "/completion",
                {**ASKED, "prompt": "the quick brown fox jumps over the lazy dog", "n_predict": n_predict},
            )
            timings.append(answer["timings"])
        found = await metrics_of(http)
        assert {name for name, (kind, _) in found.items() if kind == "counter"} == COUNTERS
        assert {name for name, (kind, _) in found.items() if kind == "gauge"} == GAUGES
        value = {name: number for name, (_, number) in found.items()}
        assert value["prompt_tokens_total"] == sum(each["prompt_n"] for each in timings)
        assert value["prompt_tokens_cached_total"] == sum(each["cache_n"] for each in timings) > 0
        assert value["tokens_predicted_total"] == sum(each["predicted_n"] for each in timings) == 21
        assert value["prompt_seconds_total"] == pytest.approx(sum(each["prompt_ms"] for each in timings) / 1000)
        assert value["n_tokens_max"] == timings[-1]["prompt_n"] + timings[-1]["cache_n"] + 16
        assert value["n_decode_total"] >= 21
        assert value["requests_processing"] == value["requests_deferred"] == 0
        assert value["n_busy_slots_per_decode"] == 1
        assert value["prompt_tokens_seconds"] > 0
        assert value["predicted_tokens_seconds"] > 0


async def test_prompts_of_embeddings_are_counted(tiny_encoder: Path) -> None:
    async with serve(tiny_encoder, {"pooling": "mean"}) as http:
        _, answer = await post(http, "/v1/embeddings", {"input": ["a b", "c"]})
        value = {name: number for name, (_, number) in (await metrics_of(http)).items()}
        assert value["prompt_tokens_total"] == answer["usage"]["prompt_tokens"] > 0
        assert (value["n_decode_total"] > 0, value["tokens_predicted_total"]) == (True, 0)
