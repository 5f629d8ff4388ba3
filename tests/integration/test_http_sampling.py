"""Sampling over HTTP: OpenAI's fields and llama.cpp's, log-probabilities, structured output, the best of many."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from openai.types import Completion as OpenAICompletion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from cppbatch import BatchInferenceEngine, SamplingParams
from cppbatch.engine.params import GRAMMARS
from cppbatch.server.api.openai.completions import CompletionRequest
from tests.support.fixtures import engine_of
from tests.support.http_client import Http, post
from tests.unit.test_http_sampling import MESSAGES, OTHERS

Json = dict[str, Any]

SETTINGS: dict[str, Any] = {"n_ctx": 2048, "n_parallel": 16, "n_threads": 1, "flash_attn": "off"}
SETTINGS |= {"prefix_cache": False, "spec": "off"}  # log-probabilities are compared to the last bit

NOISE = 0.01  # of a log-probability, from batch to batch

GREEDY: Json = {"prompt": "Hello", "temperature": 0, "max_tokens": 8, "ignore_eos": True}

SAMPLED: Json = {"prompt": "Hello", "temperature": 1, "max_tokens": 12, "ignore_eos": True}

CHAT: Json = {"messages": MESSAGES, "temperature": 0, "max_tokens": 8, "ignore_eos": True}

engine = engine_of(**SETTINGS)


@pytest.fixture
async def client(http: Http) -> AsyncIterator[openai.AsyncOpenAI]:
    url = str(http.make_url("/v1"))
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


async def complete(http: Http, **body: Any) -> Json:
    """The first choice of a completion."""
    return (await complete_all(http, **body))[0]


async def complete_all(http: Http, **body: Any) -> list[Json]:
    status, answer = await post(http, "/v1/completions", body)
    assert status == 200, answer
    choices: list[Json] = answer["choices"]
    return choices


async def chat(http: Http, **body: Any) -> Json:
    status, answer = await post(http, "/v1/chat/completions", {**CHAT, **body})
    assert status == 200, answer
    choice: Json = answer["choices"][0]
    return choice


async def streamed(http: Http, path: str, **body: Any) -> list[Json]:
    """The choices of a stream's chunks."""
    async with http.post(path, json={**body, "stream": True}) as answer:
        assert answer.status == 200
        *events, done, _ = (await answer.text()).split("\n\n")
    assert done == "data: [DONE]"
    return [choice for event in events for choice in json.loads(event.removeprefix("data: "))["choices"]]


def joined(chunks: list[Json], name: str) -> list[Any]:
    """A list of `logprobs` over all chunks."""
    return [entry for chunk in chunks if chunk["logprobs"] for entry in chunk["logprobs"][name]]


async def refusal(http: Http, body: Json, path: str = "/v1/completions") -> tuple[str, str]:
    """Which field a 400 names, and why."""
    status, answer = await post(http, path, body)
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error"), answer
    assert answer["error"]["message"].startswith(answer["error"]["param"].split("[")[0])
    return answer["error"]["param"], answer["error"]["message"]


# --- log-probabilities of completions --------------------------------------------------------------------------------


@pytest.mark.parametrize("n_top", [0, 5, 20])
async def test_a_completions_logprobs_have_openais_four_lists(http: Http, n_top: int) -> None:
    choice = await complete(http, **GREEDY, logprobs=n_top)
    logprobs = choice["logprobs"]
    assert set(logprobs) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    assert {len(values) for values in logprobs.values()} == {8}
    for token, logprob, top in zip(*(logprobs[name] for name in list(logprobs)[:3]), strict=True):
        assert top[token] == logprob <= 0
        assert 1 <= len(top) <= max(n_top, 1)
        assert logprob == max(top.values())  # greedy


async def test_http_logprobs_are_those_of_the_engine(http: Http, tiny_llama: Path) -> None:
    with BatchInferenceEngine(tiny_llama, **SETTINGS) as engine:
        params = SamplingParams(temperature=1, seed=4, max_tokens=8, ignore_eos=True, logprobs=3)
        (expected,) = engine.generate(["Hello"], params)
    shown = (await complete(http, **{**GREEDY, "temperature": 1}, seed=4, logprobs=3))["logprobs"]
    assert shown["token_logprobs"] == pytest.approx([entry.logprob for entry in expected.logprobs], abs=1e-4)
    assert shown["text_offset"] == [entry.text_offset for entry in expected.logprobs]
    for top, entry in zip(shown["top_logprobs"], expected.logprobs, strict=True):
        assert entry.logprob is not None
        likeliest = {piece: logprob for _, piece, logprob in entry.top} | {entry.piece: entry.logprob}
        assert sorted(top.values()) == pytest.approx(sorted(likeliest.values()), abs=1e-4)


async def test_half_a_character_is_shown_as_its_bytes(http: Http) -> None:
    choice = await complete(http, prompt="é", echo=True, max_tokens=0, logprobs=0)
    assert choice["logprobs"]["tokens"] == ["<s>", "bytes:\\xc3", "bytes:\\xa9"]


async def test_without_logprobs_the_field_is_absent(http: Http) -> None:
    assert (await complete(http, **GREEDY))["logprobs"] is None
    assert (await complete(http, **GREEDY, echo=True))["logprobs"] is None
    assert (await chat(http))["logprobs"] is None
    assert (await chat(http, logprobs=False))["logprobs"] is None


async def test_each_choice_has_its_own_logprobs(http: Http) -> None:
    choices = await complete_all(http, **{**SAMPLED, "prompt": ["Hello", "abc"]}, n=2, seed=1, logprobs=1)
    assert len({json.dumps(choice["logprobs"]) for choice in choices}) == 4
    for choice in choices:
        assert len(choice["logprobs"]["tokens"]) == 12


# --- echo ------------------------------------------------------------------------------------------------------------


async def test_echo_puts_the_prompt_before_the_text_and_its_logprobs_before_the_texts(http: Http) -> None:
    plain, echoed = [await complete(http, **GREEDY, logprobs=2, echo=echo) for echo in (False, True)]
    assert echoed["text"] == "Hello" + plain["text"]
    logprobs = echoed["logprobs"]
    assert logprobs["tokens"] == ["<s>", *"Hello", *plain["logprobs"]["tokens"]]
    assert (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == (None, None)
    assert all(logprob < 0 for logprob in logprobs["token_logprobs"][1:])
    assert logprobs["token_logprobs"][6:] == pytest.approx(plain["logprobs"]["token_logprobs"], abs=0.05)
    assert logprobs["text_offset"][:6] == [0, 0, 1, 2, 3, 4]
    assert logprobs["text_offset"][6:] == [5 + offset for offset in plain["logprobs"]["text_offset"]]


async def test_echo_of_token_ids_is_their_text(http: Http) -> None:
    choice = await complete(http, **{**GREEDY, "prompt": [1, 300, 301]}, echo=True, logprobs=0)
    assert choice["text"].startswith("<s>GH")
    assert choice["logprobs"]["tokens"][:3] == ["<s>", "G", "H"]


async def test_with_max_tokens_0_and_echo_the_prompt_is_scored_and_nothing_else(http: Http) -> None:
    body: dict[str, Any] = {"prompt": "the cat sat " * 20, "max_tokens": 0, "echo": True, "logprobs": 1}
    status, answer = await post(http, "/v1/completions", body)
    choice, usage = answer["choices"][0], answer["usage"]
    assert (status, choice["text"], choice["finish_reason"]) == (200, "the cat sat " * 20, "length")
    assert (usage["completion_tokens"], usage["total_tokens"]) == (0, usage["prompt_tokens"])
    assert len(choice["logprobs"]["tokens"]) == usage["prompt_tokens"] > 64
    assert "".join(choice["logprobs"]["tokens"][1:]) == "the cat sat " * 20


async def test_max_tokens_0_without_echo_is_refused(http: Http) -> None:
    assert (await refusal(http, {**GREEDY, "max_tokens": 0}))[0] == "max_tokens"


async def test_every_prompt_of_a_request_is_echoed(http: Http) -> None:
    choices = await complete_all(http, prompt=["one", "two"], n=2, max_tokens=0, echo=True, logprobs=0)
    assert [choice["text"] for choice in choices] == ["one", "one", "two", "two"]
    assert ["".join(choice["logprobs"]["tokens"]) for choice in choices] == ["<s>one"] * 2 + ["<s>two"] * 2


# --- log-probabilities of chats, and streamed ------------------------------------------------------------------------


async def test_a_chats_logprobs_are_the_completions_of_the_same_prompt(http: Http) -> None:
    choice = await chat(http, logprobs=True, top_logprobs=3)
    prompt = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    same = await complete(http, **{**GREEDY, "prompt": prompt}, logprobs=3)
    assert choice["message"]["content"] == same["text"]
    content = choice["logprobs"]["content"]
    assert [entry["logprob"] for entry in content] == pytest.approx(same["logprobs"]["token_logprobs"], abs=0.05)
    for entry in content:
        assert [len(entry["top_logprobs"]), entry["token"]] == [3, bytes(entry["bytes"]).decode("utf-8", "replace")]
        top = [likely["logprob"] for likely in entry["top_logprobs"]]
        assert top == sorted(top, reverse=True)
        assert entry["top_logprobs"][0] == {name: entry[name] for name in ("token", "logprob", "bytes")}  # greedy
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode("utf-8", "replace") == same["text"]


@pytest.mark.parametrize("more", [{}, {"top_logprobs": 0}])
async def test_a_chat_may_ask_for_the_taken_tokens_only(http: Http, more: Json) -> None:
    content = (await chat(http, logprobs=True, **more))["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in content] == [[]] * 8


async def test_top_logprobs_without_logprobs_or_too_many_are_refused(http: Http) -> None:
    path = "/v1/chat/completions"
    assert (await refusal(http, {**CHAT, "top_logprobs": 2}, path))[0] == "top_logprobs"
    for n in (-1, 21):
        field, message = await refusal(http, {**CHAT, "logprobs": True, "top_logprobs": n}, path)
        assert field == "top_logprobs"
        assert f"is {n}; it must be from 0 to 20" in message


@pytest.mark.parametrize("more", [{}, {"echo": True}, {"stop": ["a"]}, {"stop": ["a"], "include_stop": True}])
async def test_a_streamed_completions_logprobs_add_up_to_the_whole(http: Http, more: Json) -> None:
    for seed in range(4):
        body: dict[str, Any] = {**SAMPLED, "seed": seed, "logprobs": 2, **more}
        whole, chunks = await complete(http, **body), await streamed(http, "/v1/completions", **body)
        for name, values in whole["logprobs"].items():
            assert joined(chunks, name) == values
        assert "".join(chunk["text"] for chunk in chunks) == whole["text"]
        assert (chunks[-1]["finish_reason"], chunks[-1]["seed"]) == (whole["finish_reason"], whole["seed"])


async def test_a_streamed_chats_logprobs_add_up_to_the_whole(http: Http) -> None:
    body: dict[str, Any] = {**CHAT, "temperature": 1, "seed": 3, "logprobs": True, "top_logprobs": 2}
    whole = await chat(http, **body)
    chunks = await streamed(http, "/v1/chat/completions", **body)
    assert joined(chunks, "content") == whole["logprobs"]["content"]
    assert "".join(chunk["delta"].get("content") or "" for chunk in chunks) == whole["message"]["content"]


async def test_max_tokens_0_can_be_streamed(http: Http) -> None:
    chunks = await streamed(http, "/v1/completions", prompt="abc", max_tokens=0, echo=True, logprobs=0)
    assert "".join(chunk["text"] for chunk in chunks) == "abc"
    assert joined(chunks, "tokens") == ["<s>", "a", "b", "c"]
    assert chunks[-1]["finish_reason"] == "length"


# --- the official client ---------------------------------------------------------------------------------------------


async def test_openais_client_reads_a_completions_logprobs(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(
        model="tiny-llama", prompt="Hello", max_tokens=6, logprobs=5, seed=1, n=2, extra_body={"ignore_eos": True}
    )
    OpenAICompletion.model_validate(answer.model_dump(), strict=True)
    for choice in answer.choices:
        assert choice.logprobs is not None
        assert len(choice.logprobs.tokens or ()) == len(choice.logprobs.text_offset or ()) == 6
        tops = choice.logprobs.top_logprobs or []
        assert all(isinstance(logprob, float) for top in tops for logprob in top.values())


async def test_openais_client_reads_a_chats_logprobs_whole_and_streamed(client: openai.AsyncOpenAI) -> None:
    asked: dict[str, Any] = {"max_completion_tokens": 6, "seed": 1, "logprobs": True, "top_logprobs": 4}
    whole = await client.chat.completions.create(model="tiny-llama", messages=MESSAGES, **asked)
    assert isinstance(whole, ChatCompletion)
    assert whole.usage
    ChatCompletion.model_validate(whole.model_dump(), strict=True)
    stream = await client.chat.completions.create(model="tiny-llama", messages=MESSAGES, stream=True, **asked)
    assert isinstance(stream, openai.AsyncStream)
    chunks = [chunk async for chunk in stream]
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk.model_dump(), strict=True)
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None
    content = logprobs.content or []
    assert [len(entry.top_logprobs) for entry in content] == [4] * whole.usage.completion_tokens
    pieces = [chunk.choices[0].logprobs for chunk in chunks]
    assert [entry for piece in pieces if piece for entry in piece.content or ()] == content


async def test_openais_client_reads_an_echo(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model="tiny-llama", prompt="Hello", max_tokens=0, echo=True, logprobs=0)
    logprobs = answer.choices[0].logprobs
    assert answer.choices[0].text == "Hello"
    assert logprobs is not None
    assert logprobs.tokens == ["<s>", *"Hello"]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (6, 0)


SIZES = {
    "type": "object",
    "properties": {"size": {"enum": ["small", "large"]}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["size", "n"],
    "additionalProperties": False,
}


async def test_openais_client_gets_json_of_its_schema(client: openai.AsyncOpenAI) -> None:
    envelope: Any = {"type": "json_schema", "json_schema": {"name": "sizes", "schema": SIZES, "strict": True}}
    answer = await client.chat.completions.create(
        model="tiny-llama", messages=MESSAGES, max_tokens=200, seed=1, response_format=envelope, logprobs=True
    )
    assert answer.choices[0].finish_reason == "stop"
    jsonschema.validate(json.loads(answer.choices[0].message.content or ""), SIZES)
    incomplete: Any = {"type": "json_schema"}
    with pytest.raises(openai.BadRequestError, match="json_schema"):
        await client.chat.completions.create(model="tiny-llama", messages=MESSAGES, response_format=incomplete)


async def test_openais_client_gets_the_best_of_many(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model="tiny-llama", prompt="Hello", max_tokens=6, n=2, best_of=5, seed=1)
    OpenAICompletion.model_validate(answer.model_dump(), strict=True)
    assert [choice.index for choice in answer.choices] == [0, 1]


# --- best_of ---------------------------------------------------------------------------------------------------------


DIFFERENT: Json = {**SAMPLED, "seed": 242, "stop": ["e"]}
"""Candidates of different lengths. The first is not the best, nor is the one of the highest sum, nor, with the prompt's
log-probabilities, the one of the highest mean."""


def mean_logprob(choice: Json) -> float:
    logprobs = choice["logprobs"]["token_logprobs"]
    return float(sum(logprobs) / len(logprobs))


def sum_of_logprobs(choice: Json) -> float:
    return float(sum(choice["logprobs"]["token_logprobs"]))


@pytest.mark.parametrize("n", [1, 3])
async def test_the_best_are_those_of_the_highest_mean_logprob_of_all_that_n_would_return(http: Http, n: int) -> None:
    body: dict[str, Any] = {**DIFFERENT, "prompt": ["Hello", "abc"]}
    everything = await complete_all(http, **body, n=6, logprobs=0)
    best = await complete_all(http, **body, n=n, best_of=6)
    assert [choice["index"] for choice in best] == list(range(2 * n))
    for of_prompt, its_best in ((everything[:6], best[:n]), (everything[6:], best[n:])):
        by_seed = {choice["seed"]: choice for choice in of_prompt}
        assert [choice["text"] for choice in its_best] == [by_seed[choice["seed"]]["text"] for choice in its_best]
        means = [mean_logprob(by_seed[choice["seed"]]) for choice in its_best]
        assert means == pytest.approx(sorted(map(mean_logprob, of_prompt), reverse=True)[:n], abs=NOISE)
        assert means[0] > mean_logprob(of_prompt[0]) + NOISE
        assert means[0] > mean_logprob(max(of_prompt, key=sum_of_logprobs)) + NOISE
    assert [choice["logprobs"] for choice in best] == [None] * 2 * n


async def test_the_best_have_logprobs_on_request(http: Http) -> None:
    body: dict[str, Any] = {**DIFFERENT, "logprobs": 2}
    everything = await complete_all(http, **body, n=6)
    (best,) = await complete_all(http, **body, best_of=6)
    (same,) = [choice for choice in everything if choice["seed"] == best["seed"]]
    assert best["logprobs"]["tokens"] == same["logprobs"]["tokens"]
    assert all(len(top) >= 2 for top in best["logprobs"]["top_logprobs"])
    assert mean_logprob(best) == pytest.approx(max(map(mean_logprob, everything)), abs=NOISE)


async def test_an_echoed_prompt_has_no_part_in_what_is_best(http: Http) -> None:
    body: dict[str, Any] = {**DIFFERENT, "n": 2, "best_of": 6}
    plain, echoed = await complete_all(http, **body), await complete_all(http, **body, echo=True)
    assert [choice["text"] for choice in echoed] == ["Hello" + choice["text"] for choice in plain]


async def test_the_tokens_of_all_candidates_are_counted_and_their_prompt_once(http: Http) -> None:
    _, answer = await post(http, "/v1/completions", {**SAMPLED, "best_of": 5, "n": 2})
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (6, 5 * 12)


async def test_best_of_as_many_as_n_is_n(http: Http) -> None:
    body: dict[str, Any] = {**SAMPLED, "seed": 5, "n": 3}
    assert await complete_all(http, **body, best_of=3) == await complete_all(http, **body)
    assert len(await streamed(http, "/v1/completions", **body, best_of=3)) > 3


async def test_a_chat_may_have_the_best_of_many_too(http: Http) -> None:
    body: dict[str, Any] = {"temperature": 1, "seed": 5, "logprobs": True}
    _, answer = await post(http, "/v1/chat/completions", {**CHAT, **body, "n": 6})
    means = [sum(entry["logprob"] for entry in choice["logprobs"]["content"]) / 8 for choice in answer["choices"]]
    best = await chat(http, **body, best_of=6)
    assert best["message"] == answer["choices"][means.index(max(means))]["message"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"best_of": 2, "stream": True}, "cannot be combined with `stream`"),
        ({"best_of": 1, "n": 2}, "is 1; it must be at least n, which is 2"),
        ({"best_of": 0}, "is 0; it must be from 1 to 128"),
        ({"best_of": 129}, "is 129; the limit of this server is 128 (--max-n)"),
        ({"best_of": "2"}, "expected `int | null`"),
    ],
)
async def test_an_invalid_best_of_is_refused(http: Http, more: Json, message: str) -> None:
    field, why = await refusal(http, {**GREEDY, **more})
    assert field == "best_of"
    assert message in why


# --- structured output -----------------------------------------------------------------------------------------------


SHAPES: dict[str, Json] = {
    "openai's envelope": {"type": "json_schema", "json_schema": {"name": "s", "schema": SIZES, "strict": True}},
    "llama-server's json_schema": {"type": "json_schema", "schema": SIZES},
    "llama-server's json_object": {"type": "json_object", "schema": SIZES},
}

TEXTS: dict[str, tuple[Json, str]] = {
    "guided_regex": ({"guided_regex": r"[A-C]{2}-\d{3}"}, r"[A-C]{2}-\d{3}"),
    "guided_choice": ({"guided_choice": ["yes", "no", "perhaps é"]}, "yes|no|perhaps é"),
    "gbnf": ({"grammar": 'root ::= ("ab" | "cd") [0-9]+ "."'}, r"(ab|cd)[0-9]+\."),
    "lark": ({"grammar": 'start: "x" DIGITS\nDIGITS: /[0-9]{4}/'}, r"x[0-9]{4}"),
    "regex as json_schema": ({"json_schema": {"type": "string", "pattern": "^[ab]{3}$"}}, r'"[ab]{3}"'),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
async def test_with_a_response_format_the_text_is_json_of_the_schema(http: Http, shape: Json) -> None:
    for seed in range(5):
        choice = await chat(http, temperature=1, seed=seed, max_tokens=200, response_format=shape)
        assert choice["finish_reason"] == "stop"
        jsonschema.validate(json.loads(choice["message"]["content"]), SIZES)
        chosen = await complete(http, **{**SAMPLED, "max_tokens": 200}, seed=seed, response_format=shape)
        jsonschema.validate(json.loads(chosen["text"]), SIZES)


async def test_a_json_object_answer_is_a_json_object(http: Http) -> None:
    texts = []
    for seed in range(8):
        wanted: dict[str, Any] = {"response_format": {"type": "json_object"}, "logit_bias": {"}": 8}}
        choice = await chat(http, temperature=1, seed=seed, max_tokens=300, **wanted)
        assert choice["message"]["content"].startswith("{")
        if choice["finish_reason"] == "stop":
            texts.append(choice["message"]["content"])
    assert texts
    assert all(isinstance(json.loads(text), dict) for text in texts)


@pytest.mark.parametrize(("fields", "pattern"), TEXTS.values(), ids=TEXTS)
async def test_a_guided_text_matches_as_a_whole(http: Http, fields: Json, pattern: str) -> None:
    for seed in range(5):
        choice = await complete(http, **{**SAMPLED, "max_tokens": 60}, **fields, seed=seed)
        assert choice["finish_reason"] == "stop"
        assert re.fullmatch(pattern, choice["text"])
        chunks = await streamed(http, "/v1/completions", **{**SAMPLED, "max_tokens": 60}, **fields, seed=seed)
        assert "".join(chunk["text"] for chunk in chunks) == choice["text"]


async def test_a_guided_text_has_logprobs_of_every_token(http: Http) -> None:
    body: dict[str, Any] = {**GREEDY, "max_tokens": 60, "guided_choice": ["one of a kind"], "logprobs": 1}
    choice = await complete(http, **body)
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"] == "one of a kind"
    assert min(choice["logprobs"]["token_logprobs"]) < -5  # the model itself would have said something else


@pytest.mark.parametrize("shape", [None, {"type": "text"}])
async def test_no_response_format_is_free_text(http: Http, shape: Json | None) -> None:
    assert await chat(http, response_format=shape, seed=1) == await chat(http, seed=1)


@pytest.mark.parametrize("schema", [True, {}])
async def test_a_schema_that_allows_all_gives_any_json(http: Http, schema: Any) -> None:
    for seed in range(5):
        body: dict[str, Any] = {**SAMPLED, "max_tokens": 100, "seed": seed, "json_schema": schema}
        choice = await complete(http, **body)
        if choice["finish_reason"] == "stop":
            json.loads(choice["text"])
        assert re.match(r'[\s{\["0-9tfn-]', choice["text"])


BAD_GRAMMARS: dict[str, tuple[Json, str, str]] = {
    "regex": ({"guided_regex": "a("}, "guided_regex", "unclosed group"),
    "gbnf": ({"grammar": "root ::= ("}, "grammar", "Expected ')'"),
    "gbnf without a root": ({"grammar": 'other ::= "a"'}, "grammar", "root"),
    "lark": ({"grammar": "start: undefined"}, "grammar", "undefined"),
    "schema": ({"json_schema": {"type": 5}}, "json_schema", "type must be a string or array of strings"),
    "schema of an unsupported format": (
        {"json_schema": {"type": "string", "format": "iri"}},
        "json_schema",
        "#/format: the format 'iri' is not supported",
    ),
    "schema that nothing satisfies": ({"json_schema": {"$ref": "#"}}, "json_schema", "no finite JSON"),
    "schema as a number": ({"json_schema": 5}, "json_schema", "expected `bool | str | object | null`, got `int`"),
    "envelope": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 5}}}},
        "response_format",
        "type must be a string or array of strings",
    ),
    "envelope without a schema": (
        {"response_format": {"type": "json_schema"}},
        "response_format.json_schema",
        "is required",
    ),
    "unknown format": ({"response_format": {"type": "xml"}}, "response_format.type", "it must be text, json_object"),
    "format without a type": ({"response_format": {}}, "response_format", "`type`"),
    "format of another type": ({"response_format": "json"}, "response_format", "expected `object | null`"),
    "no choices": ({"guided_choice": []}, "guided_choice", "at least one"),
    "an empty choice": ({"guided_choice": ["a", ""]}, "guided_choice", "no empty strings"),
    "choices of numbers": ({"guided_choice": [1]}, "guided_choice[0]", "expected `str`"),
    "two grammars": ({"grammar": "root ::= [a]", "guided_regex": "a"}, "grammar", "combined with guided_regex"),
    "two schemas": (
        {"response_format": {"type": "json_object"}, "json_schema": {}},
        "json_schema",
        "combined with response_format",
    ),
    "too long": ({"guided_regex": "a" * 200_000}, "guided_regex", "has 200,000 characters; the limit is 131,072"),
}


@pytest.mark.parametrize(("body", "field", "reason"), BAD_GRAMMARS.values(), ids=BAD_GRAMMARS)
async def test_a_bad_grammar_is_a_400_that_names_the_field_and_the_reason(
    http: Http, body: Json, field: str, reason: str
) -> None:
    for stream in (False, True):
        named, message = await refusal(http, {**GREEDY, **body, "stream": stream})
        assert named == field
        assert reason in message


async def test_a_schema_nested_too_deeply_is_a_400(http: Http) -> None:
    for depth in (200, 900, 50_000):
        nested = '{"items": ' * depth + "{}" + "}" * depth
        status, answer = await post(http, "/v1/completions", f'{{"prompt": "x", "json_schema": {nested}}}')
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error"), depth


# --- biases, stops, samplers, seeds ----------------------------------------------------------------------------------


async def test_a_bias_favours_a_token_by_its_id_or_its_text(http: Http) -> None:
    by_id = await complete(http, **GREEDY, logit_bias={"300": 100})
    by_text = await complete(http, **GREEDY, logit_bias={"G": 100})
    assert by_id["text"] == by_text["text"] == "G" * 8
    added_up = await complete(http, **GREEDY, logit_bias={"300": 60, "G": 60, "H": 90})
    assert added_up["text"] == "G" * 8


async def test_a_bias_of_minus_100_forbids(http: Http) -> None:
    for n in range(3):
        body: dict[str, Any] = {**GREEDY, "max_tokens": 20, "logprobs": 0, "suppress_tokens": list(range(5, 261))}
        tokens = (await complete(http, **body))["logprobs"]["tokens"]
        forbidden = tokens[n]
        assert " " + forbidden not in tokens
        without = await complete(http, **body, logit_bias={forbidden: -100})
        assert forbidden not in without["logprobs"]["tokens"]


@pytest.mark.parametrize(
    ("bias", "message"),
    [
        ({"512": 1}, "contains the token id 512; token ids are 0 to 511"),
        ({"9" * 5000: 1}, "contains the token id 99"),
        ({"a": 101}, "is 101.0 for 'a'; it must be from -100 to 100"),
        ({"": 1}, "has the key ''"),
    ],
    ids=["id out of range", "a huge id", "too much", "no key"],
)
async def test_a_bad_bias_is_a_400(http: Http, bias: Json, message: str) -> None:
    field, why = await refusal(http, {**GREEDY, "logit_bias": bias})
    assert field == "logit_bias"
    assert message in why


async def test_include_stop_leaves_the_stop_string_in_the_text(http: Http) -> None:
    body: dict[str, Any] = {**GREEDY, "max_tokens": 40, "logit_bias": {"G": 100}, "stop": ["GGG"]}
    cut, kept = await complete(http, **body), await complete(http, **body, include_stop=True)
    assert (cut["text"], kept["text"]) == ("", "GGG")
    assert cut["finish_reason"] == kept["finish_reason"] == "stop"
    chunks = await streamed(http, "/v1/completions", **body, include_stop=True)
    assert "".join(chunk["text"] for chunk in chunks) == "GGG"


async def test_control_tokens_are_in_the_text_only_on_request(http: Http) -> None:
    body: dict[str, Any] = {**GREEDY, "max_tokens": 3, "logit_bias": {"3": 100}}
    assert (await complete(http, **body))["text"] == ""
    assert (await complete(http, **body, skip_special_tokens=False))["text"] == "<|im_start|>" * 3
    assert (await complete(http, **body, logprobs=0))["logprobs"]["tokens"] == ["<|im_start|>"] * 3
    for names, seen in ((["no token", "<|im_start|>"], "<|im_start|>" * 3), (["<|im_end|>"], "")):
        assert (await complete(http, **body, visible_tokens=names))["text"] == seen


async def test_samplers_reports_what_is_applied(http: Http) -> None:
    greedy = (await complete(http, **GREEDY))["text"]
    hot: dict[str, Any] = {**SAMPLED, "max_tokens": 8, "temperature": 50, "top_k": 1, "seed": 1}
    assert (await complete(http, **hot, samplers=["top_k", "temperature"]))["text"] == greedy
    assert (await complete(http, **hot, samplers=["temperature"]))["text"] != greedy
    assert (await refusal(http, {**hot, "samplers": ["top_k", "top_q"]}))[0] == "samplers[1]"


@pytest.mark.parametrize(
    ("alias", "name", "value"), [("repeat_penalty", "repetition_penalty", 5), ("repeat_last_n", "penalty_last_n", 2)]
)
async def test_llama_cpps_names_of_the_penalties_are_accepted(http: Http, alias: str, name: str, value: float) -> None:
    body: dict[str, Any] = {**GREEDY, "max_tokens": 40} | (
        {} if name == "repetition_penalty" else {"repetition_penalty": 5}
    )
    plain, by_alias, by_name = [
        (await complete(http, **body, **more))["text"] for more in ({}, {alias: value}, {name: value})
    ]
    assert by_alias == by_name != plain


@pytest.mark.parametrize("given", [{}, {"seed": None}, {"seed": -1}])
async def test_the_seed_in_an_answer_gives_its_text_again(http: Http, given: Json) -> None:
    first = await complete(http, **SAMPLED, **given)
    assert await complete(http, **SAMPLED, seed=first["seed"]) == first
    *chunks, last = await streamed(http, "/v1/completions", **SAMPLED, seed=first["seed"])
    assert ("".join(chunk["text"] for chunk in chunks), last["seed"]) == (first["text"], first["seed"])
    choice = await chat(http, temperature=1, **given)
    assert await chat(http, temperature=1, seed=choice["seed"]) == choice


async def test_choices_without_a_seed_have_one_each(http: Http) -> None:
    assert len({choice["seed"] for choice in await complete_all(http, **SAMPLED, n=8)}) == 8


@pytest.mark.parametrize("seed", [0, 7, 2**32 - 1, 2**53 + 1, 2**64 - 1, -2])
async def test_a_given_seed_is_the_one_that_is_used(http: Http, seed: int) -> None:
    first, again = [await complete(http, **SAMPLED, seed=seed) for _ in range(2)]
    assert first == again
    assert first["seed"] == seed % 2**64
    assert (await complete(http, **SAMPLED, seed=first["seed"]))["text"] == first["text"]


# --- every field -----------------------------------------------------------------------------------------------------


async def test_all_fields_can_be_given_at_once(http: Http) -> None:
    for grammar in GRAMMARS:
        fields: dict[str, Any] = {
            name: value for name, value in OTHERS.items() if name == grammar or name not in GRAMMARS
        }
        status, answer = await post(http, "/v1/completions", {"prompt": "x", **fields})
        assert (status, answer["choices"][0]["seed"]) == (200, 3), answer


async def test_every_field_may_be_null(http: Http) -> None:
    names = [name for name in CompletionRequest.__struct_encode_fields__ if name != "prompt"]
    plain = await complete(http, prompt="Hello", seed=1)
    nulls: dict[str, Any] = {name: None for name in names if name != "seed"}
    assert await complete(http, prompt="Hello", seed=1, **nulls) == plain


# --- nothing is dropped in silence -----------------------------------------------------------------------------------


ENDS: Json = {"ignore_eos": False, "logit_bias": {"2": 100}}


async def test_the_end_token_is_listed_and_counted_in_completions_and_chat(http: Http) -> None:
    for stream in (False, True):
        body = {**GREEDY, **ENDS, "logprobs": 2, "echo": True, "max_tokens": 1, "stream": stream}
        async with http.post("/v1/completions", json=body) as answer:
            text = await answer.text()
        events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")] or [
            json.loads(text)
        ]
        shown = [choice["logprobs"] for event in events for choice in event["choices"] if choice["logprobs"]]
        tokens = [token for each in shown for token in each["tokens"]]
        assert (tokens[0], tokens[-1]) == ("<s>", "</s>")
        assert "".join(tokens[1:-1]) == "Hello"
        assert all(isinstance(value, float) for each in shown for value in each["token_logprobs"][1:])
    _, answer = await post(http, "/v1/completions", {**GREEDY, **ENDS, "max_tokens": 1})
    assert (answer["usage"]["completion_tokens"], answer["choices"][0]["text"]) == (1, "")
    choice = await chat(http, **ENDS, logprobs=True)
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == ["</s>"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "stop")


@pytest.mark.parametrize("stream", [False, True])
async def test_fields_without_effect_are_listed_in_a_header(http: Http, stream: bool) -> None:
    body = {**GREEDY, "stream": stream, "request_tag": 1, "a b": 2, "user": "me"}
    async with http.post("/v1/completions", json=body) as answer:
        assert (answer.status, answer.headers["X-Ignored-Fields"]) == (200, "request_tag, a%20b")
    async with http.post("/v1/completions", json=GREEDY) as answer:
        assert "X-Ignored-Fields" not in answer.headers


REFUSED_FIELDS: list[tuple[str, Json]] = [
    ("repetition_penalti", {"repetition_penalti": 2}),
    ("web_search_options", {"web_search_options": {}}),
    ("modalities", {"modalities": ["text", "audio"]}),
    ("reasoning_effort", {"reasoning_effort": "enormous"}),
    ("service_tier", {"service_tier": "gold"}),
    ("store", {"store": True}),
    ("conversation", {"conversation": "conv_1"}),
    ("continue_final_message", {"continue_final_message": True, "add_generation_prompt": True}),
]


@pytest.mark.parametrize(("field", "fields"), REFUSED_FIELDS)
async def test_unknown_fields_that_would_change_the_answer_are_refused_with_their_name(
    http: Http, field: str, fields: Json
) -> None:
    status, answer = await post(http, "/v1/chat/completions", {**CHAT, **fields})
    assert (status, answer["error"]["param"]) == (400, field)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_constraints_under_other_servers_names_hold(http: Http, path: str) -> None:
    forms: list[Json] = [
        {"structured_outputs": {"regex": "[ab]{3}"}},
        {"regex": "[ab]{3}"},
        {"guided_grammar": "root ::= [ab] [ab] [ab]"},
        {"response_format": {"type": "regex", "value": "[ab]{3}"}},
        {"structured_outputs": {"choice": ["aba", "bab"]}},
        {"guided_json": {"enum": ["aba", "bab"]}},
        {"response_format": {"type": "json_object", "value": {"enum": ["aba", "bab"]}}},
    ]
    for form in forms:
        body = {**(GREEDY if path == "/v1/completions" else CHAT), "max_tokens": 20, **form}
        status, answer = await post(http, path, body)
        assert status == 200, answer
        choice = answer["choices"][0]
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        assert re.fullmatch('"?[ab]{3}"?', text), (form, text)
    body = {**(GREEDY if path == "/v1/completions" else CHAT), "guided_grammar": "root ::= ("}
    status, answer = await post(http, path, body)
    assert (status, answer["error"]["param"]) == (400, "guided_grammar")


@pytest.mark.parametrize("field", [b'"\xed\xa0": 1', b'"bad_words": ["\xff"]', b'"other": "\xff"'])
async def test_unknown_fields_that_are_not_utf8_are_not_json(http: Http, field: bytes) -> None:
    async with http.post("/v1/completions", data=b'{"prompt": "x", "max_tokens": 1, ' + field + b"}") as answer:
        assert (answer.status, (await answer.json())["error"]["param"]) == (400, "body")
