"""The project's own endpoints on a tiny model: one prompt, many prompts, and one bad prompt among many."""

from __future__ import annotations

import asyncio
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientResponse
from aiohttp.test_utils import TestClient, TestServer

from cppbatch import LocalEngine
from cppbatch.server import run_requests
from cppbatch.server.app import create_app
from cppbatch.server.auth.rules import Keys, api_key
from cppbatch.server.http.limits import Limits
from cppbatch.server.settings import ServerSettings
from tests.support.http_client import Http, http_to, post

Json = dict[str, Any]
USER = [{"role": "user", "content": "a"}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
TOO_LONG = "x" * 5000


async def stream(http: Http, path: str, body: Json) -> list[Json]:
    """The events' data; checks that [DONE] ends them."""
    async with http.post(path, json={**body, "stream": True}) as answer:
        assert answer.content_type == "text/event-stream"
        *events, done, rest = (await answer.text()).split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


async def batch(http: Http, **body: Any) -> Json:
    answer: Json
    status, answer = await post(http, "/generate/batch", {**GREEDY, **body})
    assert status == 200, answer
    assert [result["index"] for result in answer["results"]] == list(range(len(answer["results"])))
    assert answer["failed"] == sum("error" in result for result in answer["results"])
    return answer


async def text_of(http: Http, prompt: object, **fields: Any) -> str:
    status, answer = await post(http, "/generate", {**GREEDY, **fields, "prompt": prompt})
    assert status == 200, answer
    text: str = answer["text"]
    return text


async def is_idle(engine: LocalEngine) -> bool:
    for _ in range(300):
        stats = await engine.stats()
        if not (stats.running or stats.waiting or stats.kv_cells_used):
            return True
        await asyncio.sleep(0.01)
    return False


# --- one prompt -------------------------------------------------------------------------------------------------------


async def test_an_answer_has_text_tokens_counts_and_times(http: Http) -> None:
    _, answer = await post(http, "/generate", {**GREEDY, "prompt": "abc"})
    assert answer["generated_text"] == answer["text"] == "".join(answer["token_texts"])
    assert len(answer["token_texts"]) == len(answer["tokens"]) == answer["completion_tokens"] == 6
    assert answer["finish_reason"] == "length"
    assert answer["prompt_tokens"] > 1
    assert isinstance(answer["seed"], int)
    times = answer["timings"]
    assert 0 <= times["queue_seconds"] < times["time_to_first_token_seconds"] < times["total_seconds"] < 10
    assert "logprobs" not in answer


async def test_token_ids_are_as_good_as_their_text(http: Http, engine: LocalEngine) -> None:
    ids = [token.id for token in await engine.tokenize("abc")]
    assert await text_of(http, ids) == await text_of(http, "abc")
    assert (await batch(http, prompts=[ids, {"prompt": ids}]))["results"][1]["text"] == await text_of(http, "abc")


async def test_without_max_tokens_the_context_is_the_limit(http: Http) -> None:
    _, answer = await post(http, "/generate", {"prompt": "abc", "temperature": 0, "ignore_eos": True})
    assert answer["finish_reason"] == "length"
    assert answer["prompt_tokens"] + answer["completion_tokens"] == 1024


async def test_log_probabilities_come_with_ids_and_the_most_likely_first(http: Http) -> None:
    _, answer = await post(http, "/generate", {**GREEDY, "prompt": "abc", "logprobs": 2})
    assert [entry["id"] for entry in answer["logprobs"]] == answer["tokens"]
    for entry in answer["logprobs"]:
        assert entry["top_logprobs"][0]["id"] == entry["id"]  # greedy
        assert entry["logprob"] == entry["top_logprobs"][0]["logprob"] > entry["top_logprobs"][1]["logprob"]


async def test_a_stream_has_the_same_text_and_the_other_fields_in_its_last_event(http: Http) -> None:
    body: dict[str, Any] = {**GREEDY, "prompt": "abc", "max_tokens": 200}
    _, whole = await post(http, "/generate", body)
    *events, last = await stream(http, "/generate", body)
    assert "".join(event["text"] for event in [*events, last]) == whole["text"]
    assert [token for event in [*events, last] for token in event["tokens"]] == whole["tokens"]
    assert len(events) > 3
    assert [text for event in [*events, last] for text in event["token_texts"]] == whole["token_texts"]
    assert all(set(event) == {"text", "tokens", "token_texts"} for event in events)
    assert set(last) == set(whole) - {"generated_text"}
    assert last["completion_tokens"] == 200


BAD = {
    "no prompt": ({}, "prompt"),
    "a prompt and messages": ({"prompt": "a", "messages": USER}, "prompt"),
    "messages with an unknown role": ({"messages": [{"role": "cat", "content": "a"}]}, "messages[0].role"),
    "messages too long": ({"messages": [{"role": "user", "content": TOO_LONG}]}, "messages"),
    "an empty prompt": ({"prompt": ""}, "prompt"),
    "a prompt too long": ({"prompt": TOO_LONG}, "prompt"),
    "an unknown token": ({"prompt": [1, 10**6]}, "prompt[1]"),
    "a list of prompts": ({"prompt": ["a", "b"]}, "prompt[0]"),
    "several texts": ({"prompt": "a", "n": 2}, "n"),
    "the best of several": ({"prompt": "a", "best_of": 2}, "best_of"),
    "a temperature out of range": ({"prompt": "a", "temperature": -1}, "temperature"),
    "a grammar by SGLang's name": ({"prompt": "a", "ebnf": "root ::= ("}, "ebnf"),
    "a schema by vLLM's name": ({"messages": USER, "guided_json": {"type": 5}}, "guided_json"),
    "not an object": ("[]", "body"),
    "no JSON": ("{", "body"),
}


@pytest.mark.parametrize(("body", "field"), BAD.values(), ids=BAD.keys())
async def test_a_bad_request_is_a_400_that_names_the_field(http: Http, body: object, field: str) -> None:
    status, answer = await post(http, "/generate", body)
    assert (status, answer["error"]["param"]) == (400, field)


# --- many prompts -----------------------------------------------------------------------------------------------------


async def test_a_batch_returns_what_each_prompt_alone_would_get(http: Http) -> None:
    prompts = ["abc", "Hello", "the cat", "zz top", "1 2 3", "x"]
    answer = await batch(http, prompts=prompts)
    assert [result["text"] for result in answer["results"]] == [await text_of(http, prompt) for prompt in prompts]
    assert (answer["total_prompts"], answer["failed"], answer["completion_tokens"]) == (6, 0, 36)
    assert answer["prompt_tokens"] == sum(result["prompt_tokens"] for result in answer["results"])
    assert answer["avg_time_per_prompt"] == pytest.approx(answer["total_time_seconds"] / 6)
    assert answer["tokens_per_second"] == pytest.approx(36 / answer["total_time_seconds"])
    assert max(result["timings"]["total_seconds"] for result in answer["results"]) <= answer["total_time_seconds"]


BAD_ITEMS = {
    "an empty prompt": ("", "prompts[1]"),
    "no prompt at all": ({"temperature": 1}, "prompts[1].prompt"),
    "messages with an unknown role": ({"messages": [{"role": "cat", "content": "a"}]}, "prompts[1].messages[0].role"),
    "a number": (5, "prompts[1]"),
    "nothing": (None, "prompts[1]"),
    "an unknown token": ([1, 10**6], "prompts[1][1]"),
    "a prompt of another type": ({"prompt": {"a": 1}}, "prompts[1].prompt"),
    "an override of another type": ({"prompt": "a", "temperature": "hot"}, "prompts[1].temperature"),
    "an override out of range": ({"prompt": "a", "top_p": 7}, "prompts[1].top_p"),
    "a grammar that is none": ({"prompt": "a", "grammar": "root ::= ("}, "prompts[1].grammar"),
    "a grammar by SGLang's name": ({"prompt": "a", "ebnf": "root ::= ("}, "prompts[1].ebnf"),
    "a schema by vLLM's name": ({"messages": USER, "guided_json": {"type": 5}}, "prompts[1].guided_json"),
    "a schema that is none": ({"prompt": "a", "json_schema": {"type": 5}}, "prompts[1].json_schema"),
    "a stop string that is empty": ({"prompt": "a", "stop": [""]}, "prompts[1].stop"),
    "a priority out of range": ({"prompt": "a", "priority": 1000}, "prompts[1].priority"),
    "a model name that is not a string": ({"prompt": "a", "model": 9}, "prompts[1].model"),
    "a stream of its own": ({"prompt": "a", "stream": True}, "prompts[1].stream"),
    "several texts": ({"prompt": "a", "n": 2}, "prompts[1].n"),
}


@pytest.mark.parametrize(("item", "field"), BAD_ITEMS.values(), ids=BAD_ITEMS.keys())
async def test_one_bad_item_fails_alone_with_the_reason(http: Http, item: object, field: str) -> None:
    first, bad, last = (await batch(http, prompts=["abc", item, "abc"]))["results"]
    assert first["text"] == last["text"] == await text_of(http, "abc")
    assert set(bad) == {"index", "error"}
    assert (bad["error"]["param"], bad["error"]["type"]) == (field, "invalid_request_error")
    assert bad["error"]["message"].startswith(field)


async def test_a_batch_of_bad_items_only_is_answered_too(http: Http) -> None:
    assert [result["error"]["param"] for result in (await batch(http, prompts=[5, ""]))["results"]] == [
        "prompts[0]",
        "prompts[1]",
    ]
    *errors, totals = await stream(http, "/generate/batch", {"prompts": [5, None]})
    assert [error["index"] for error in errors] == [0, 1]
    assert totals["failed"] == 2


BAD_BATCHES = {
    "nothing to do": ({}, "prompts"),
    "no prompts": ({"prompts": []}, "prompts"),
    "too many prompts": ({"prompts": ["a"] * 257}, "prompts"),
    "one text for prompts": ({"prompts": "abc"}, "prompts"),
    "a prompt without params": ({"prompt": "a"}, "params"),
    "a prompt and messages": ({"prompt": "a", "messages": [], "params": [{}]}, "prompts"),
    "both ways at once": ({"prompts": ["a"], "prompt": "a", "params": [{}]}, "prompts"),
    "prompts with no params": ({"prompts": ["a"], "params": []}, "params"),
    "too many prompts with params": ({"prompts": ["a"] * 16, "params": [{}] * 17}, "params"),
    "a default that all items have": ({"prompts": ["a"], "temperature": -1}, "temperature"),
    "a model name that is not a string": ({"prompts": ["a"], "model": 9}, "model"),
    "several texts": ({"prompts": ["a"], "n": 2}, "n"),
    "not an object": ("[]", "body"),
    "no JSON": ("{", "body"),
}


@pytest.mark.parametrize(("body", "field"), BAD_BATCHES.values(), ids=BAD_BATCHES.keys())
async def test_an_error_of_the_whole_batch_is_a_400(http: Http, body: object, field: str) -> None:
    status, answer = await post(http, "/generate/batch", body)
    assert (status, answer["error"]["param"]) == (400, field)


async def test_an_items_own_fields_win_over_those_of_all(http: Http) -> None:
    items = [
        "abc",
        {"prompt": "abc", "max_tokens": 3},
        {"prompt": "abc", "max_tokens": None},
        {"prompt": "abc", "grammar": 'root ::= "yes"', "ignore_eos": False},
        {"prompt": "abc", "repetition_penalty": 1.0},
    ]
    shared: dict[str, Any] = {"repeat_penalty": 3.0, "guided_choice": ["no"], "ignore_eos": False}
    results = (await batch(http, prompts=items, **shared))["results"]
    assert [result["text"] for result in results] == ["no", "no", "no", "yes", "no"]
    results = (await batch(http, prompts=items, repeat_penalty=3.0))["results"]
    assert [result.get("completion_tokens") for result in results][:2] == [6, 3]
    assert results[2]["completion_tokens"] > 100
    assert results[4]["text"] == await text_of(http, "abc")
    assert results[0]["text"] == await text_of(http, "abc", repeat_penalty=3.0) != results[4]["text"]


async def test_16_settings_of_one_prompt_compute_it_once(http: Http, engine: LocalEngine) -> None:
    prompt = "the cat sat on the mat and " * 6
    settings = [{"temperature": 0.1 * i, "seed": i} for i in range(16)]
    answer = await batch(http, prompt=prompt, params=settings)
    texts = [result["text"] for result in answer["results"]]
    assert texts == [await text_of(http, prompt, **each) for each in settings]
    assert len(set(texts)) > 4
    n = answer["results"][0]["prompt_tokens"]
    assert n > 60
    assert answer["cached_tokens"] >= 15 * (n - 1)


async def test_a_bad_setting_of_one_prompt_fails_alone(http: Http) -> None:
    answer = await batch(http, prompt="abc", params=[{}, {"top_k": "many"}, 7, {"min_p": 2}])
    assert [result.get("error", {}).get("param") for result in answer["results"]] == [
        None,
        "params[1].top_k",
        "params[2]",
        "params[3].min_p",
    ]


async def test_prompts_and_params_make_a_grid_of_all_pairs(http: Http) -> None:
    prompts = ["abc", {"prompt": "Hello", "max_tokens": 4}, "zz top"]
    params = [{"temperature": 0}, {"temperature": 1, "seed": 7}, {"max_tokens": 2}]
    results = (await batch(http, prompts=prompts, params=params))["results"]
    assert len(results) == 9
    assert [len(result["tokens"]) for result in results] == [6, 6, 2, 4, 4, 2, 6, 6, 2]
    assert results[1]["text"] == await text_of(http, "abc", temperature=1, seed=7)
    assert results[6]["text"] == await text_of(http, "zz top")
    for result in results:
        assert result["generated_text"] == result["text"] == "".join(result["token_texts"])


async def test_a_bad_item_of_a_grid_fails_alone_and_names_its_part(http: Http) -> None:
    answer = await batch(http, prompts=["abc", 5], params=[{}, {"top_p": 7}, {"prompt": "another"}])
    assert [result.get("error", {}).get("param") for result in answer["results"]] == [
        None,
        "params[1].top_p",
        "params[2].prompt",
        "prompts[1]",
        "prompts[1]",
        "params[2].prompt",
    ]


async def test_a_batch_is_streamed_item_by_item_with_the_totals_last(http: Http) -> None:
    items = ["abc", 5, "Hello", TOO_LONG]
    whole = await batch(http, prompts=items, max_tokens=200)
    *events, totals = await stream(http, "/generate/batch", {**GREEDY, "prompts": items, "max_tokens": 200})
    for result in whole["results"]:
        mine = [event for event in events if event["index"] == result["index"]]
        if "error" in result:
            assert mine == [result]
        else:
            assert "".join(event["text"] for event in mine) == result["text"]
            assert [token for event in mine for token in event["tokens"]] == result["tokens"]
            assert [event.get("finish_reason") for event in mine][-1] == "length"
            assert len(mine) > 3
    assert (totals["total_prompts"], totals["failed"], totals["completion_tokens"]) == (4, 2, 400)


async def test_a_batch_larger_than_the_queue_finishes_and_leaves_room_for_others(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_requests, "perf_counter", itertools.count().__next__)  # a second for each try
    floats: dict[str, Any] = {
        "cache_type_k": "f32",
        "cache_type_v": "f32",
        "flash_attn": "off",
    }  # so that no text parts at a tie
    settings: dict[str, Any] = {"n_ctx": 1024, "n_parallel": 4, "n_threads": 1, "max_queue": 2, **floats}
    async with LocalEngine(tiny_llama, **settings) as engine, http_to(engine) as http:
        prompts = [f"number {i}" for i in range(256)]
        both = asyncio.gather(*(batch(http, prompts=prompts, max_tokens=2) for _ in range(2)))
        await asyncio.sleep(0.2)
        status, _ = await post(http, "/generate", {**GREEDY, "prompt": "abc"})
        assert status in (200, 429)  # of two batches at once both may have filled the queue just now
        first, second = await both
        assert [result["text"] for result in first["results"]] == [result["text"] for result in second["results"]]
        assert first["failed"] == second["failed"] == 0
        waits = [result["timings"]["queue_seconds"] for result in first["results"]]
        assert waits[-1] >= waits[0] + 250  # the time before the engine took it counts
        assert await is_idle(engine)


async def test_timeouts_count_from_the_request_for_the_last_item_too(http: Http) -> None:
    body: dict[str, Any] = {"max_tokens": 200, "timeout": 0.3, "prompts": ["Hello"] * 200}
    last = (await batch(http, **body))["results"][-1]
    assert (last["finish_reason"], last["completion_tokens"]) == ("timeout", 0), "its time was over before it ran"


async def test_a_client_that_disconnects_frees_its_whole_batch(tiny_llama: Path) -> None:
    async with LocalEngine(tiny_llama, n_ctx=4096, n_parallel=4, n_threads=1) as engine:
        app = create_app(engine)
        async with TestClient(TestServer(app, handler_cancellation=True)) as http:
            for streams in (True, False):
                body: dict[str, Any] = {"prompts": ["Hello"] * 32, "ignore_eos": True, "stream": streams}
                asking = asyncio.create_task(http.post("/generate/batch", json=body).__aenter__())
                await asyncio.sleep(0.3)
                assert (await engine.stats()).running == 4
                asking.cancel()
                if streams:
                    ended = await asyncio.gather(asking, return_exceptions=True)
                    stream = ended[0]
                    assert isinstance(stream, ClientResponse)
                    stream.close()
                assert await is_idle(engine)


async def test_the_most_prompts_of_a_batch_can_be_set(engine: LocalEngine) -> None:
    settings = ServerSettings(limits=Limits(max_prompts_per_batch=2))
    async with http_to(engine, settings) as http:
        status, answer = await post(http, "/generate/batch", {"prompts": ["a"] * 3})
        assert status == 400
        assert "--max-prompts-per-batch" in answer["error"]["message"]
        assert len((await batch(http, prompts=["a"] * 2))["results"]) == 2


# --- conversations ----------------------------------------------------------------------------------------------------


async def rendered(http: Http, messages: list[Json]) -> str:
    """The prompt of a conversation."""
    _, answer = await post(http, "/apply-template", {"messages": messages})
    prompt: str = answer["prompt"]
    return prompt


async def test_a_conversation_continues_as_the_prompt_that_its_template_makes(http: Http) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    _, answer = await post(http, "/generate", {**GREEDY, "messages": messages})
    assert answer["text"] == await text_of(http, await rendered(http, messages))


async def test_conversations_and_prompts_are_items_of_one_batch(http: Http) -> None:
    chats = [[{"role": "user", "content": text}] for text in ("Hi", "What is a cat?")]
    items = [{"messages": chats[0]}, "abc", {"messages": chats[1], "max_tokens": 3}]
    results = (await batch(http, prompts=items, params=[{}, {"temperature": 1, "seed": 4}]))["results"]
    prompts = [await rendered(http, chats[0]), "abc", await rendered(http, chats[1])]
    assert [result["text"] for result in results] == [
        await text_of(http, prompt, **fields, max_tokens=3 if prompt == prompts[2] else 6)
        for prompt in prompts
        for fields in ({}, {"temperature": 1, "seed": 4})
    ]


async def test_one_conversation_with_several_params_computes_its_prompt_once(http: Http) -> None:
    messages = [{"role": "user", "content": "the cat sat on the mat and " * 6}]
    answer = await batch(http, messages=messages, params=[{"seed": i, "temperature": 1} for i in range(8)])
    n = answer["results"][0]["prompt_tokens"]
    assert answer["cached_tokens"] >= 7 * (n - 1)


async def test_the_messages_of_an_item_are_named_when_they_are_wrong(http: Http) -> None:
    messages, too_long = ([{"role": "user", "content": text}] for text in ("Hi", TOO_LONG))
    answer = await batch(http, messages=messages, params=[{}, {"messages": messages}])
    assert answer["results"][1]["error"]["param"] == "params[1].messages"
    answer = await batch(http, prompts=["abc", {"messages": too_long}])
    assert answer["results"][1]["error"]["param"] == "prompts[1].messages"


# --- ending one item --------------------------------------------------------------------------------------------------

LONG: Json = {"max_tokens": 900, "ignore_eos": True, "temperature": 0}


async def cancel(http: Http, request_id: str, index: int) -> int:
    return (await post(http, "/generate/batch/cancel", {"request_id": request_id, "index": index}))[0]


async def test_one_item_of_a_running_batch_is_ended_and_the_others_continue(http: Http, engine: LocalEngine) -> None:
    body = {**LONG, "prompts": ["a"] * 12, "request_id": "b", "stream": True, "max_tokens": 60}
    ends: dict[int, Json] = {}
    async with http.post("/generate/batch", json=body) as answer:
        asked = False
        async for line in answer.content:
            event = json.loads(line.removeprefix(b"data: ")) if line.startswith(b"data: {") else {}
            if event.get("index") == 1 and not asked:
                asked = True
                # 1 runs, 7 waits in the engine, 11 has not been submitted yet
                assert [await cancel(http, "b", index) for index in (1, 7, 11)] == [200] * 3
            if "finish_reason" in event:
                ends[event["index"]] = event
            if "total_prompts" in event:
                assert (event["total_prompts"], event["failed"]) == (12, 0)
    cancelled = {index for index, event in ends.items() if event["finish_reason"] == "cancelled"}
    assert (cancelled, len(ends)) == ({1, 7, 11}, 12)
    assert 0 < ends[1]["completion_tokens"] < 60
    assert await is_idle(engine)


async def test_only_an_item_of_a_running_batch_can_be_ended(http: Http) -> None:
    assert await cancel(http, "b", 0) == 404
    body = {**LONG, "prompts": ["a"], "request_id": "b", "stream": True}
    async with http.post("/generate/batch", json=body) as answer:
        await answer.content.readline()
        assert await cancel(http, "b", 1) == 400
        assert await cancel(http, "b", -1) == 400
        status, twice = await post(http, "/generate/batch", {"prompts": ["a"], "request_id": "b", "max_tokens": 1})
        assert (status, twice["error"]["param"]) == (400, "request_id")
        assert await cancel(http, "b", 0) == 200
        await answer.text()
    assert await cancel(http, "b", 0) == 404


async def test_a_key_can_end_items_of_its_batches_even_if_its_slots_are_taken(engine: LocalEngine) -> None:
    keys = Keys([api_key("one", max_concurrent=1), api_key("two")])
    async with http_to(engine, ServerSettings(keys=keys)) as http:
        one, two = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
        body = {**LONG, "prompts": ["a"], "request_id": "b", "stream": True}
        async with http.post("/generate/batch", json=body, headers=one) as answer:
            await answer.content.readline()
            item = {"request_id": "b", "index": 0}
            for headers, status in ((two, 404), (one, 200)):
                async with http.post("/generate/batch/cancel", json=item, headers=headers) as ended:
                    assert ended.status == status
            assert '"finish_reason":"cancelled"' in await answer.text()
