"""llama-server's API on a tiny model: what its clients send, and every field that they read."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import gguf
import pytest
from aiohttp.test_utils import TestClient, TestServer

from cppbatch import EngineConfig, LocalEngine
from cppbatch.models.synthetic import GgufVocab, byte_vocab
from cppbatch.server.answer.mixed_prompts import MEDIA_MARKER
from cppbatch.server.app import create_app
from cppbatch.server.settings import ServerSettings
from tests.support import tiny_models
from tests.support.http_client import Http, get, http_of, http_to, post
from tests.support.lora_files import write_lora

Json = dict[str, Any]
GREEDY: dict[str, Any] = {"temperature": 0, "n_predict": 6, "ignore_eos": True}
FINAL = set(
    "index content tokens id_slot stop model tokens_predicted tokens_evaluated generation_settings prompt has_new_line "
    "truncated stop_type stopping_word tokens_cached timings".split()
)
CHUNK = {"index", "content", "tokens", "stop", "id_slot", "tokens_predicted", "tokens_evaluated"}
TIMINGS = set(
    "cache_n prompt_n prompt_ms prompt_per_token_ms prompt_per_second predicted_n predicted_ms predicted_per_token_ms "
    "predicted_per_second".split()
)


async def complete(http: Http, prompt: object = "abc", **fields: Any) -> Any:
    status, answer = await post(http, "/completion", {**GREEDY, "prompt": prompt, **fields})
    assert status == 200, answer
    return answer


async def stream(http: Http, path: str = "/completion", **fields: Any) -> list[Json]:
    async with http.post(path, json={**GREEDY, "prompt": "abc", **fields, "stream": True}) as answer:
        assert answer.content_type == "text/event-stream"
        text = await answer.text()
    assert text.endswith("}\n\n")  # no [DONE]
    return [json.loads(event.removeprefix("data: ")) for event in text.split("\n\n")[:-1]]


# --- /completion ------------------------------------------------------------------------------------------------------


async def test_a_completion_has_every_field_of_llama_servers(http: Http, tiny_llama: Path) -> None:
    answer = await complete(http)
    assert set(answer) == FINAL
    assert set(answer["timings"]) == TIMINGS
    assert answer["content"]
    assert (answer["index"], answer["stop"], answer["model"], answer["tokens"]) == (0, True, tiny_llama.stem, [])
    assert (answer["stop_type"], answer["stopping_word"], answer["truncated"]) == ("limit", "", False)
    assert answer["prompt"] == "<s>abc"
    assert (answer["tokens_predicted"], answer["tokens_evaluated"], answer["tokens_cached"]) == (6, 4, 9)
    assert (answer["timings"]["cache_n"], answer["timings"]["prompt_n"], answer["timings"]["predicted_n"]) == (0, 4, 6)
    assert answer["timings"]["prompt_ms"] > 0
    assert answer["timings"]["predicted_per_token_ms"] == pytest.approx(answer["timings"]["predicted_ms"] / 5)
    assert answer["has_new_line"] == ("\n" in answer["content"])


async def test_the_settings_report_what_was_used(http: Http) -> None:
    asked: dict[str, Any] = {
        "top_k": 7,
        "typical_p": 0.9,
        "repeat_penalty": 1.25,
        "stop": ["zz"],
        "seed": 5,
        "dry_multiplier": 0.5,
    }
    used = (await complete(http, **asked, samplers=["top_k", "typ_p", "temperature"]))["generation_settings"]
    assert {name: used[name] for name in asked} == asked
    assert used["samplers"] == ["top_k", "typ_p", "temperature"]
    assert used["n_predict"] == used["max_tokens"] == 6
    assert (await complete(http, seed=used["seed"], temperature=1))["generation_settings"]["seed"] == 5


async def test_a_stream_is_chunks_and_then_the_answer_without_its_text(http: Http) -> None:
    whole = await complete(http, n_predict=200, return_tokens=True)
    *chunks, last = await stream(http, n_predict=200)
    assert len(chunks) > 3
    assert all(set(chunk) == CHUNK and chunk["stop"] is False for chunk in chunks)
    assert "".join(chunk["content"] for chunk in chunks) == whole["content"]
    assert [token for chunk in chunks for token in chunk["tokens"]] == whole["tokens"]
    assert chunks[-1]["tokens_predicted"] == last["tokens_predicted"] == 200
    assert set(last) == FINAL
    assert (last["stop"], last["content"], last["tokens"]) == (True, "", [])
    assert {chunk["tokens_evaluated"] for chunk in chunks} == {last["tokens_evaluated"]} == {4}


@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 0}, {"temperature": 1.5}, {"temperature": 1, "typical_p": 0.8}, {"temperature": 1, "mirostat": 2}],
    ids=["greedy", "vectorised", "chain", "mirostat"],
)
async def test_post_sampling_probs_are_those_that_the_token_was_drawn_from(http: Http, sampling: Json) -> None:
    fields = {**sampling, "n_probs": 20, "post_sampling_probs": True, "seed": 1, "top_k": 6, "n_predict": 8}
    answer = await complete(http, **fields)
    assert answer["generation_settings"]["post_sampling_probs"] is True
    entries = answer["completion_probabilities"]
    assert len(entries) == 8
    for entry in entries:
        assert set(entry) == {"id", "token", "bytes", "prob", "top_probs"}
        probs = {top["id"]: top["prob"] for top in entry["top_probs"]}
        assert probs[entry["id"]] == pytest.approx(entry["prob"])
        assert all(0 < prob <= 1 for prob in probs.values())
        if len(probs) < 20:
            assert sum(probs.values()) == pytest.approx(1)
    n_listed = [len(entry["top_probs"]) for entry in entries]
    assert n_listed == [1] * 8 if sampling == {"temperature": 0} else max(n_listed) > 1
    *chunks, _ = await stream(http, **fields)
    streamed = [chunk["completion_probabilities"][0] for chunk in chunks]
    assert [entry["id"] for entry in streamed] == [entry["id"] for entry in entries]
    assert [entry["prob"] for entry in streamed] == pytest.approx([entry["prob"] for entry in entries], abs=0.02)


async def test_completions_without_v1_is_the_same_endpoint(http: Http) -> None:
    status, answer = await post(http, "/completions", {**GREEDY, "prompt": "abc"})
    assert (status, answer["content"]) == (200, (await complete(http))["content"])


async def test_prompts_may_be_texts_ids_both_mixed_or_several(http: Http, engine: LocalEngine) -> None:
    ids = [token.id for token in await engine.tokenize("abc")]
    tail = [token.id for token in await engine.tokenize("bc", add_special=False)]
    one = await complete(http)
    for same in (ids, [*ids[:2], *ids[2:]], {"prompt_string": "abc"}, ["abc"], [ids]):
        assert (await complete(http, same))["content"] == one["content"]
    mixed = await complete(http, ["a", *tail, "x"])
    assert mixed["prompt"] == "<s>abc" + "x"
    assert (await complete(http, [ids[1], "bc"]))["prompt"] == "abc"  # starts with an id: no BOS
    several = await complete(http, ["abc", ids, [*ids[:1], "abc"], {"prompt_string": "abc"}])
    assert [answer["index"] for answer in several] == [0, 1, 2, 3]
    assert {answer["content"] for answer in several} == {one["content"]}


async def test_several_texts_of_each_prompt(http: Http) -> None:
    answers = await complete(http, ["a", "b"], n_cmpl=2, temperature=1, seed=3)
    assert [answer["index"] for answer in answers] == [0, 1, 2, 3]
    assert [answer["prompt"] for answer in answers] == ["<s>a", "<s>a", "<s>b", "<s>b"]
    assert answers[0]["content"] != answers[1]["content"]


async def test_it_reports_the_word_that_stopped_it(http: Http) -> None:
    text = (await complete(http))["content"]
    word = text[2:4]
    stopped = await complete(http, stop=["never", "", word])
    assert (stopped["stop_type"], stopped["stopping_word"]) == ("word", word)
    assert stopped["content"] == text[: text.index(word)]
    last = (await stream(http, stop=[word]))[-1]
    assert (last["stop_type"], last["stopping_word"]) == ("word", word)


async def test_the_models_own_end_is_an_eos(http: Http) -> None:
    ended = await complete(http, ignore_eos=False, logit_bias=[["</s>", 1], [2, 99]])
    assert (ended["stop_type"], ended["stopping_word"], ended["tokens_predicted"]) == ("eos", "", 1)
    ended = await complete(http, ignore_eos=False, grammar='root ::= "yes"', n_predict=-1)
    assert (ended["stop_type"], ended["content"]) == ("eos", "yes")


async def test_without_a_limit_the_context_is_the_limit(http: Http) -> None:
    for length in ({"n_predict": -1}, {"n_predict": 5000}, {"n_predict": None, "max_tokens": 5000}):
        answer = await complete(http, **length)
        assert (answer["stop_type"], answer["truncated"]) == ("limit", True)
        assert answer["tokens_predicted"] + answer["tokens_evaluated"] == 1024


async def test_n_predict_0_only_warms_the_cache(http: Http) -> None:
    prompt = "the cat sat on the mat and " * 12
    warmed = await complete(http, prompt, n_predict=0, n_probs=3)
    assert (warmed["content"], warmed["tokens_predicted"], warmed["stop_type"]) == ("", 0, "limit")
    (last,) = await stream(http, prompt=prompt, n_predict=0)
    assert last["stop"] is True
    timings = (await complete(http, prompt))["timings"]
    assert timings["cache_n"] > 100
    assert timings["prompt_n"] + timings["cache_n"] == warmed["tokens_evaluated"]
    assert (await complete(http, prompt, cache_prompt=False))["timings"]["cache_n"] == 0


async def test_n_probs_shows_the_most_likely_tokens(http: Http) -> None:
    whole = await complete(http, n_probs=3, return_tokens=True)
    shown = whole["completion_probabilities"]
    assert [entry["id"] for entry in shown] == whole["tokens"]
    for entry in shown:
        assert set(entry) == {"id", "token", "bytes", "logprob", "top_logprobs"}
        assert [set(each) for each in entry["top_logprobs"]] == [{"id", "token", "bytes", "logprob"}] * 3
        assert bytes(entry["bytes"]).decode("utf-8", "replace") == entry["token"]
    *chunks, last = await stream(http, n_probs=3)
    assert [entry["id"] for chunk in chunks for entry in chunk["completion_probabilities"]] == whole["tokens"]
    assert "completion_probabilities" not in last
    assert "completion_probabilities" not in await complete(http, n_probs=0)


async def test_response_fields_leave_only_those(http: Http) -> None:
    fields = ["content", "generation_settings/n_predict", "timings/predicted_n", "no/such", "content/deeper"]
    whole = await complete(http)
    assert await complete(http, response_fields=fields) == {
        "content": whole["content"],
        "generation_settings/n_predict": 6,
        "timings/predicted_n": 6,
    }
    assert await complete(http, response_fields=[""]) == {}


async def test_timings_per_token_report_the_speed_so_far(http: Http) -> None:
    *chunks, _ = await stream(http, n_predict=100, timings_per_token=True)
    assert [chunk["timings"]["predicted_n"] for chunk in chunks] == [chunk["tokens_predicted"] for chunk in chunks]
    assert chunks[-1]["timings"]["predicted_per_second"] > 0


async def test_values_out_of_range_mean_what_they_mean_there(http: Http) -> None:
    greedy = await complete(http)
    assert (await complete(http, temperature=-1, top_k=-1, top_p=5))["content"] == greedy["content"]
    texts = {(await complete(http, temperature=1.5, seed=2**32 - 1, n_predict=12))["content"] for _ in range(4)}
    assert len(texts) > 1  # that is how clients write "any seed"
    assert (await complete(http, grammar="", json_schema=None, stop=""))["content"] == greedy["content"]
    free = await complete(http, json_schema={}, ignore_eos=False, n_predict=40)
    assert free["content"].startswith("{")


async def test_samplers_have_llama_servers_names(http: Http) -> None:
    async def order(samplers: object) -> Any:
        return (await complete(http, samplers=samplers))["generation_settings"]["samplers"]

    assert await order(["dry", "typ_p", "Min-P", "nucleus", "temp"]) == [
        "dry",
        "typ_p",
        "min_p",
        "top_p",
        "temperature",
    ]
    assert await order(["top_k", "topp", "infill", "adaptive_p"]) == ["top_k", "top_p"]
    assert await order("edskypmxt") == ("penalties dry top_n_sigma top_k typ_p top_p min_p xtc temperature".split())
    assert await order([]) == []


@pytest.mark.parametrize(
    "banned",
    [lambda i, t: [[i, False]], lambda i, t: [[t, False]], lambda i, t: {str(i): False}, lambda i, t: {t: -99}],
)
async def test_a_token_can_be_banned_in_all_of_its_ways(http: Http, engine: LocalEngine, banned: Any) -> None:
    token, text = 326, "a"
    assert [each.id for each in await engine.tokenize(text, add_special=False)] == [token]
    bias = [[token, 50.0]]
    assert set((await complete(http, logit_bias=bias, return_tokens=True))["tokens"]) == {token}
    answer = await complete(http, logit_bias=banned(token, text), return_tokens=True, n_predict=50, temperature=2)
    assert token not in answer["tokens"]


async def test_t_max_predict_ms_ends_the_text_with_its_next_line(http: Http) -> None:
    newline = [["\n", 8.0]]
    body: dict[str, Any] = {"n_predict": 900, "logit_bias": newline, "temperature": 1, "seed": 1}
    whole, events = await complete(http, **body, t_max_predict_ms=30), await stream(http, **body, t_max_predict_ms=30)
    for short in (whole, events[-1]):
        assert (short["stop_type"], short["has_new_line"]) == ("limit", True)
        assert 1 < short["tokens_predicted"] < 800
        assert short["timings"]["predicted_ms"] >= 30
    assert (await complete(http, **body, t_max_predict_ms=0))["tokens_predicted"] == 900
    unbroken = await complete(http, n_predict=300, guided_regex="[a-z]{300}", ignore_eos=False, t_max_predict_ms=1)
    assert not unbroken["has_new_line"]
    assert unbroken["tokens_predicted"] > 50


BAD = {
    "no prompt": ({}, "prompt"),
    "an empty prompt": ({"prompt": []}, "prompt"),
    "a prompt of another type": ({"prompt": 5}, "prompt"),
    "a far too long one": ({"prompt": "x" * (1 << 21)}, "prompt"),
    "an unknown token": ({"prompt": ["a", 5, 10**6]}, "prompt[2]"),
    "one in a second prompt": ({"prompt": ["a", [5, 10**6]]}, "prompt[1][1]"),
    "an image without its marker": (
        {"prompt": {"prompt_string": "x", "multimodal_data": ["abc"]}},
        "prompt.prompt_string",
    ),
    "an image for a model without a projector": (
        {"prompt": {"prompt_string": MEDIA_MARKER, "multimodal_data": ["abc"]}},
        "prompt.multimodal_data[0]",
    ),
    "data that is not a list": ({"prompt": {"prompt_string": "x", "multimodal_data": 5}}, "prompt.multimodal_data"),
    "something else in a list": ({"prompt": ["a", 2.5]}, "prompt[1]"),
    "too many prompts": ({"prompt": ["a"] * 300}, "prompt"),
    "n_predict as text": ({"prompt": "a", "n_predict": "all"}, "n_predict"),
    "n_predict below -1": ({"prompt": "a", "n_predict": -2}, "n_predict"),
    "too many probabilities": ({"prompt": "a", "n_probs": 21}, "n_probs"),
    "too many texts": ({"prompt": "a", "n_cmpl": 1000}, "n_cmpl"),
    "min_keep": ({"prompt": "a", "min_keep": 3}, "min_keep"),
    "n_indent": ({"prompt": "a", "n_indent": 4}, "n_indent"),
    "an unknown sampler": ({"prompt": "a", "samplers": ["top_k", "magic"]}, "samplers[1]"),
    "a bias that is none": ({"prompt": "a", "logit_bias": [[5, "much"]]}, "logit_bias"),
    "no pair": ({"prompt": "a", "logit_bias": [[5, 1], [5]]}, "logit_bias[1]"),
    "an unknown token's bias": ({"prompt": "a", "logit_bias": [[10**6, 1]]}, "logit_bias"),
    "a grammar that is none": ({"prompt": "a", "grammar": "root ::= ("}, "grammar"),
    "the best of several": ({"prompt": "a", "best_of": 2}, "best_of"),
}


@pytest.mark.parametrize(("body", "field"), BAD.values(), ids=BAD.keys())
async def test_a_bad_completion_request_is_a_400_that_names_the_field(http: Http, body: Json, field: str) -> None:
    status, answer = await post(http, "/completion", body)
    assert (status, answer["error"]["param"]) == (400, field), answer
    assert answer["error"]["message"].startswith(field.split("[", maxsplit=1)[0])


async def test_a_client_that_disconnects_frees_everything(tiny_llama: Path) -> None:
    async with LocalEngine(tiny_llama, n_ctx=4096, n_parallel=4, n_threads=1) as engine:
        app = create_app(engine)
        async with TestClient(TestServer(app, handler_cancellation=True)) as http:
            body: dict[str, Any] = {"prompt": ["a", "b"], "ignore_eos": True, "t_max_predict_ms": 60_000}
            asking = asyncio.create_task(http.post("/completion", json=body).__aenter__())
            await asyncio.sleep(0.2)
            assert (await engine.stats()).running == 2
            asking.cancel()
            for _ in range(300):
                if (stats := await engine.stats()).running == 0:
                    break
                await asyncio.sleep(0.01)
            assert (stats.running, stats.kv_cells_used) == (0, 0)


# --- tokens -----------------------------------------------------------------------------------------------------------


async def test_text_to_tokens_and_back(http: Http, engine: LocalEngine) -> None:
    text = "Hello, 媽 <s> world"
    _, answer = await post(http, "/tokenize", {"content": text})
    assert answer["tokens"] == [token.id for token in await engine.tokenize(text, add_special=False)]
    assert (await post(http, "/detokenize", answer)) == (200, {"content": text, "prompt": text})
    _, with_bos = await post(http, "/tokenize", {"content": text, "add_special": True})
    assert with_bos["tokens"] == [1, *answer["tokens"]]
    _, plain = await post(http, "/tokenize", {"content": "<s>", "parse_special": False})
    assert len(plain["tokens"]) == 3
    assert (await post(http, "/tokenize", {"content": ""}))[1] == {"tokens": []}
    assert (await post(http, "/detokenize", {"tokens": []}))[1] == {"content": "", "prompt": ""}


async def test_tokenize_accepts_vllms_form_too(http: Http, engine: LocalEngine) -> None:
    plain = [token.id for token in await engine.tokenize("Hello", add_special=False)]
    bos = [token.id for token in await engine.tokenize("", add_special=True)]
    _, answer = await post(http, "/tokenize", {"model": "any", "prompt": "Hello"})
    assert answer == {"tokens": bos + plain, "count": len(bos + plain), "max_model_len": 1024}
    _, answer = await post(
        http, "/tokenize", {"prompt": "Hello", "add_special_tokens": False, "return_token_strs": True}
    )
    assert (answer["tokens"], "".join(answer["token_strs"])) == (plain, "Hello")
    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    _, answer = await post(http, "/tokenize", chat)
    _, asked = await post(http, "/v1/chat/completions", {**chat, "max_tokens": 1})
    assert answer["count"] == asked["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/tokenize", {}, "content"),
        ("/tokenize", {"text": "Hello"}, "content"),
        ("/tokenize", {"content": "a", "prompt": "a"}, "prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"ids": [1]}, "tokens"),
    ],
)
async def test_no_tokens_are_the_answer_to_nothing_only(http: Http, path: str, body: Json, field: str) -> None:
    status, answer = await post(http, path, body)
    assert (status, answer["error"]["param"]) == (400, field)


async def test_tokenizer_info_has_what_clients_without_a_tokenizer_need(http: Http) -> None:
    _, info = await get(http, "/tokenizer_info")
    assert (info["bos_token"], info["eos_token"], info["add_bos_token"]) == ("<s>", "</s>", True)
    assert info["model_max_length"] == 1024
    assert "message" in info["chat_template"]


async def test_pieces_are_text_or_bytes(http: Http) -> None:
    _, answer = await post(http, "/tokenize", {"content": "aé", "with_pieces": True})
    assert answer["tokens"] == [
        {"id": 326, "piece": "a"},
        {"id": 5 + 0xC3, "piece": [0xC3]},
        {"id": 5 + 0xA9, "piece": [0xA9]},
    ]


async def test_content_may_mix_texts_and_ids(http: Http) -> None:
    _, answer = await post(http, "/tokenize", {"content": ["a", 7, 8, "a"], "add_special": True})
    assert answer["tokens"] == [1, 326, 7, 8, 326]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/tokenize", {"content": 5}, "content"),
        ("/tokenize", {"content": ["a", 10**6]}, "content[1]"),
        ("/tokenize", {"content": "x" * (1 << 21)}, "content"),
        ("/tokenize", {"content": ["x", 5] * 1001}, "content"),
        ("/detokenize", {"tokens": "abc"}, "tokens"),
        ("/detokenize", {"tokens": [1, -1]}, "tokens[1]"),
        ("/apply-template", {}, "messages"),
        ("/apply-template", {"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
    ],
)
async def test_other_bad_requests_name_the_field_too(http: Http, path: str, body: Json, field: str) -> None:
    status, answer = await post(http, path, body)
    assert (status, answer["error"]["param"]) == (400, field)


async def test_a_conversation_as_its_prompt(http: Http) -> None:
    messages = [{"role": "user", "content": "hello"}]
    status, answer = await post(http, "/apply-template", {"messages": messages})
    assert status == 200
    assert answer == {"prompt": "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"}
    chat = await post(http, "/v1/chat/completions", {"messages": messages, "temperature": 0, "max_tokens": 6})
    text = await complete(http, answer["prompt"], ignore_eos=False)
    assert text["content"] == chat[1]["choices"][0]["message"]["content"]


# --- filling in -------------------------------------------------------------------------------------------------------


def with_fill_in_tokens(*names: str) -> GgufVocab:
    """The byte vocabulary with these control tokens in place of its last words."""
    vocab = byte_vocab()
    n = len(vocab.pieces) - len(names)
    return GgufVocab(
        pieces=[*vocab.pieces[:n], *names],
        scores=vocab.scores,
        types=[*vocab.types[:n], *[gguf.TokenType.CONTROL] * len(names)],
    )


FILL_IN = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")


@pytest.fixture(params=[(), ("<reponame>", "<|file_sep|>")], ids=["alone", "with files"])
async def infill(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Http]:
    path = tiny_models.llama(tmp_path / "fill.gguf", vocab=with_fill_in_tokens(*FILL_IN, *request.param))
    async with http_of(path, n_ctx=512, n_parallel=2, n_threads=1) as http:
        http.files = bool(request.param)  # type: ignore[attr-defined]
        yield http


async def test_infill_asks_in_the_models_own_form(infill: Http) -> None:
    body: dict[str, Any] = {**GREEDY, "input_prefix": "def f(", "input_suffix": "<s> end", "prompt": "x"}
    status, answer = await post(infill, "/infill", body)
    assert (status, set(answer)) == (200, FINAL)
    assert answer["prompt"] == "<s><fim_prefix>def f(x<fim_suffix><s> end<fim_middle>"
    n_read = len((await post(infill, "/tokenize", {"content": answer["prompt"]}))[1]["tokens"])
    assert answer["tokens_evaluated"] == n_read + 2  # the suffix's "<s>" is not a control token
    extra = [{"filename": "a.py", "text": "A"}, {"text": "B"}]
    _, answer = await post(infill, "/infill", {**body, "input_extra": extra})
    files = "<reponame>project\n<|file_sep|>a.py\nA\n<|file_sep|>tmp\nB\n<|file_sep|>current\n"
    before = files if infill.files else "a.py\nA\ntmp\nB\n"  # type: ignore[attr-defined]
    assert answer["prompt"] == f"<s>{before}<fim_prefix>def f(x<fim_suffix><s> end<fim_middle>"
    *_, last = await stream(infill, "/infill", **body)
    assert last["stop"] is True


async def test_infill_keeps_the_text_nearest_to_the_cursor(infill: Http) -> None:
    body: dict[str, Any] = {"input_prefix": "p" * 900 + "HERE", "input_suffix": "AFTER" + "s" * 900, "n_predict": 32}
    status, answer = await post(infill, "/infill", {**body, "input_extra": [{"text": "far" * 100}]})
    assert status == 200
    prefix, suffix = answer["prompt"].split("<fim_suffix>")
    assert prefix.endswith("pHERE")
    assert suffix.startswith("AFTERs")
    assert "far" not in prefix
    assert answer["tokens_evaluated"] + 32 == 512
    assert len(prefix) > 2 * len(suffix)


async def test_infill_without_such_a_model_or_its_fields_is_a_400(http: Http, infill: Http) -> None:
    good: dict[str, Any] = {"input_prefix": "a", "input_suffix": "b"}
    status, answer = await post(http, "/infill", good)
    assert (status, "was not trained for fill-in-the-middle" in answer["error"]["message"]) == (400, True)
    for bad in ({"input_prefix": "a"}, {"input_suffix": "a"}, {**good, "prompt": ["a"]}):
        assert (await post(infill, "/infill", bad))[0] == 400
    for extra in ({}, {"filename": "ok"}, {"filename": 1, "text": "a"}, {"text": 5}):
        assert (await post(infill, "/infill", {**good, "input_extra": [extra]}))[0] == 400


# --- what the server is -----------------------------------------------------------------------------------------------


async def test_one_model_is_listed_as_by_llama_server(http: Http) -> None:
    """Zed takes a status for a sign of several models, and sends requests of `n_ctx` tokens."""
    _, answer = await get(http, "/v1/models")
    (model,) = answer["data"]
    _, props = await get(http, "/props")
    assert "status" not in model
    assert model["meta"]["n_ctx"] == props["default_generation_settings"]["n_ctx"] <= model["meta"]["n_cells"]


async def test_the_events_of_one_model_are_a_silent_stream(http: Http) -> None:
    async with http.get("/models/sse") as answer:
        assert (answer.status, answer.content_type) == (200, "text/event-stream")


async def test_props_have_what_front_ends_read(http: Http, tiny_llama: Path) -> None:
    status, props = await get(http, "/props")
    assert status == 200
    assert (props["total_slots"], props["model_path"], props["model_alias"]) == (4, str(tiny_llama), tiny_llama.stem)
    assert (props["bos_token"], props["eos_token"], props["is_sleeping"]) == ("<s>", "</s>", False)
    assert props["n_keep"] is None, "without --context-shift a text ends where its context is full"
    assert props["modalities"] == {"vision": False, "video": False, "audio": False}
    assert "add_generation_prompt" in props["chat_template"]
    assert props["chat_template_caps"] == {
        "supports_tools": False, "supports_tool_calls": False, "supports_parallel_tool_calls": False,
        "supports_system_role": True, "supports_string_content": True, "supports_typed_content": False,
        "supports_object_arguments": False, "supports_preserve_reasoning": False, "supports_reasoning_effort": False,
    }  # fmt: skip
    assert props["build_info"]
    defaults = props["default_generation_settings"]
    assert defaults["n_ctx"] == 1024
    used = (await complete(http, n_predict=-1, temperature=0.8, ignore_eos=False))["generation_settings"]
    assert {**defaults["params"], "seed": 0} == {**used, "seed": 0}


async def test_the_defaults_may_be_sent_back(http: Http) -> None:
    _, props = await get(http, "/props")
    params = props["default_generation_settings"]["params"]
    assert (await complete(http, **{**params, **GREEDY}))["content"] == (await complete(http))["content"]


async def test_slots_show_how_many_sequences_run(http: Http, engine: LocalEngine) -> None:
    status, idle = await get(http, "/slots")
    assert status == 200
    assert [slot["id"] for slot in idle] == [0, 1, 2, 3]
    assert [slot["n_ctx"] for slot in idle] == [1024] * 4
    assert not any(slot["is_processing"] for slot in idle)
    assert (await get(http, "/slots?fail_on_no_slot=1"))[0] == 200
    asking = asyncio.create_task(complete(http, ["a", "b", "c", "d"], n_predict=240))
    for _ in range(300):
        if (await engine.stats()).running == 4:
            break
        await asyncio.sleep(0.01)
    _, busy = await get(http, "/slots")
    assert all(slot["is_processing"] for slot in busy)
    status, answer = await get(http, "/slots?fail_on_no_slot=1")
    assert (status, answer["error"]["message"]) == (503, "no slot available")
    await asking


async def test_routes_with_v1_also_have_llama_servers_names_without_it(http: Http) -> None:
    assert await get(http, "/models") == await get(http, "/v1/models")
    assert (await get(http, "/v1/health"))[1]["status"] == "ok"
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "temperature": 0, "max_tokens": 4}
    with_v1, without = [await post(http, path, body) for path in ("/v1/chat/completions", "/chat/completions")]
    assert with_v1[1]["choices"][0]["message"] == without[1]["choices"][0]["message"]


async def test_health_needs_no_key_by_either_name(engine: LocalEngine) -> None:
    from cppbatch.server.auth.rules import Keys

    async with http_to(engine, ServerSettings(keys=Keys(["k3y"]))) as http:
        assert [(await get(http, path))[0] for path in ("/health", "/v1/health", "/props")] == [200, 200, 401]


async def test_adapters_are_listed_and_chosen_by_each_request(tiny_llama: Path, tmp_path: Path) -> None:
    adapter = write_lora(tmp_path / "loud.gguf", seed=1)
    sizes: dict[str, Any] = {"n_ctx": 512, "n_parallel": 2, "n_threads": 1}
    config = EngineConfig(model_path=str(tiny_llama), lora=((str(adapter), 0.5),), **sizes)
    asked: dict[str, Any] = {"prompt": "abc", "n_predict": 16, "temperature": 0, "ignore_eos": True}
    async with http_of(config) as http:
        _, listed = await get(http, "/lora-adapters")
        assert listed == [{"id": 0, "name": "loud", "path": str(adapter), "scale": 0.5}]
        choices: list[list[Json]] = [[], [{"id": 0, "scale": 0.5}], [{"id": 0, "scale": 4}]]
        texts = [(await post(http, "/completion", asked | {"lora": lora}))[1]["content"] for lora in choices]
        assert len(set(texts)) == 3
        assert (await post(http, "/completion", asked))[1]["content"] == texts[1]
        _, named = await post(http, "/v1/completions", asked | {"max_tokens": 16, "lora": {"loud": 4}})
        assert named["choices"][0]["text"] == texts[2]
        status, answer = await post(http, "/completion", asked | {"lora": [{"id": 1, "scale": 1}]})
        assert (status, answer["error"]["param"]) == (400, "lora")


async def test_disabled_routes_return_501_and_name_the_flag(engine: LocalEngine) -> None:
    settings = ServerSettings(metrics=False, slots=False)
    async with http_to(engine, settings) as http:
        for path in ("/metrics", "/slots"):
            status, answer = await get(http, path)
            assert (status, answer["error"]["type"]) == (501, "not_supported_error")
            assert f"--no-{path[1:]}" in answer["error"]["message"]
        _, props = await get(http, "/props")
        assert not props["has_chat_template"]
        assert "<|im_start|>" in props["chat_template"]  # ChatML, without one
        assert not props["endpoint_metrics"]
        assert not props["endpoint_slots"]


async def test_vertex_ai_gets_the_answers_to_several_requests_in_one(engine: LocalEngine) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    instances = [
        {"@requestFormat": "chatCompletions", **chat},
        {"@requestFormat": "/v1/completions", "prompt": "abc", "max_tokens": 2, "temperature": 0},
        {"@requestFormat": "completions", "prompt": "abc", "max_tokens": -2},
    ]
    async with http_to(engine, ServerSettings(predict_path="/ask")) as http:
        status, answer = await post(http, "/ask", {"instances": instances})
        chat_answer, completion, refused = answer["predictions"]
        assert status == 200
        assert chat_answer["usage"]["completion_tokens"] == 3
        assert completion["choices"][0]["finish_reason"] == "length"
        assert refused["error"]["param"] == "max_tokens"
        status, answer = await post(http, "/ask", {"instances": [{"prompt": "abc"}]})
        assert status == 400
        assert "chatCompletions" in answer["error"]["message"]
    async with http_to(engine) as http, http.post("/predict", json={}) as answer_:
        assert answer_.status == 404


async def test_props_have_the_defaults_of_the_server(engine: LocalEngine) -> None:
    settings = ServerSettings(sampling_defaults={"seed": 7, "temperature": 0.25})
    async with http_to(engine, settings) as http:
        _, props = await get(http, "/props")
        params = props["default_generation_settings"]["params"]
        assert (params["seed"], params["temperature"]) == (7, 0.25)


async def test_settings_list_the_end_tokens_that_are_suppressed(http: Http) -> None:
    suppressed = (await complete(http, ignore_eos=True))["generation_settings"]["logit_bias"]
    assert suppressed
    assert all(entry["bias"] is None for entry in suppressed)
    assert (await complete(http, ignore_eos=False))["generation_settings"]["logit_bias"] == []


async def test_the_last_message_is_continued_or_answered_as_asked(http: Http) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well"}]

    async def ask(**fields: bool) -> tuple[int, Any]:
        return await post(
            http, "/v1/chat/completions", {"messages": messages, "max_tokens": 1, "verbose": True, **fields}
        )

    for fields in ({}, {"continue_final_message": True}, {"add_generation_prompt": False}):
        _, answer = await ask(**fields)
        assert answer["__verbose"]["prompt"].endswith("Well")
    for fields in ({"continue_final_message": False}, {"add_generation_prompt": True}):
        _, answer = await ask(**fields)
        assert answer["__verbose"]["prompt"].endswith("assistant\n")
    status, answer = await ask(add_generation_prompt=True, continue_final_message=True)
    assert (status, answer["error"]["param"]) == (400, "continue_final_message")


@pytest.mark.parametrize(
    ("role", "fields", "end"),
    [
        ("user", {}, "assistant\n"),
        ("user", {"add_generation_prompt": False}, "user\nWell<|im_end|>\n"),
        ("user", {"add_generation_prompt": False, "continue_final_message": False}, "user\nWell<|im_end|>\n"),
        ("user", {"continue_final_message": True}, "user\nWell"),
        ("assistant", {"add_generation_prompt": False, "continue_final_message": False}, "assistant\nWell<|im_end|>\n"),
    ],
)
async def test_without_a_generation_prompt_it_ends_with_the_last_message(
    http: Http, role: str, fields: dict[str, bool], end: str
) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}, {"role": role, "content": "Well"}], **fields}
    _, answer = await post(http, "/apply-template", body)
    assert answer["prompt"].endswith(end)


async def test_a_verbose_server_shows_what_requests_do_not_ask_for(
    http: Http, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "cppbatch.server")
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    _, answer = await post(http, "/v1/chat/completions", body)
    assert "hi" in answer["__verbose"]["prompt"]
    _, answer = await post(http, "/v1/chat/completions", body | {"verbose": False})
    assert "__verbose" not in answer
