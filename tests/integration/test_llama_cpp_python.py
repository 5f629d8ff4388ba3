"""`cppbatch.Llama` beside llama_cpp.Llama, on tiny models: the same results, in a batch."""

from __future__ import annotations

import gc
import inspect
import json
import pickle
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import gguf
import llama_cpp
import numpy as np
import pytest

import cppbatch
from cppbatch import Llama
from cppbatch.errors import ConfigError, EngineClosed, GenerationFailed, InvalidRequest
from cppbatch.llama_cpp_python.arguments import engine_settings
from tests.support import tiny_models, tiny_projectors
from tests.support.fake_hub import FakeHub
from tests.support.lora_files import write_lora
from tests.support.media_samples import as_url, png

F32 = 0
EXACT: dict[str, Any] = {
    "n_ctx": 256, "n_threads": 1, "n_threads_batch": 1, "verbose": False,
    "type_k": F32, "type_v": F32, "flash_attn": False,
}  # fmt: skip
PROMPTS = ["Hello", "the cat " * 3, "é" * 20, "what will they say when ", "x" * 70, "1+1="]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 24}
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if tools %}{{ tools }}{% endif %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
CITY = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "The weather", "parameters": CITY}}]
QUESTION = [{"role": "user", "content": "How is the weather in Rome?"}]

Open = Callable[..., Any]


@pytest.fixture
def opened() -> Iterator[Open]:
    """Makes objects of both classes, which are closed at the end."""
    made = []

    def open_model(path: Path, *, cls: Any = Llama, **arguments: Any) -> Any:
        made.append(cls(str(path), **{**EXACT, **arguments}))
        return made[-1]

    yield open_model
    for each in made:
        each.close()


def whole_characters(path: Path, **kwargs: Any) -> Path:
    """A tiny model that writes no parts of characters, at which llama-cpp-python exceeds `max_tokens`."""
    kinds = gguf.TokenType
    return tiny_models.llama(path, silent=(kinds.UNKNOWN, kinds.CONTROL, kinds.UNUSED, kinds.BYTE), **kwargs)


@pytest.fixture(scope="session")
def tiny_llama(tiny_folder: Path) -> Path:
    return whole_characters(tiny_folder / "whole-characters.gguf")


@pytest.fixture(scope="session")
def tiny_chat(tiny_folder: Path) -> Path:
    return whole_characters(tiny_folder / "tiny-chat.gguf", chat_template=TEMPLATE)


@pytest.fixture(scope="session", params=["F32", "F16"])
def floats(request: pytest.FixtureRequest, tiny_folder: Path) -> Path:
    """The weights of both types."""
    path = tiny_folder / f"floats-{request.param}.gguf"
    return whole_characters(path, quant=request.param, chat_template=TEMPLATE, seed=3)


def plain(result: dict[str, Any]) -> dict[str, Any]:
    """A result without what differs from call to call."""
    return {name: value for name, value in result.items() if name not in ("id", "created")}


def text(chunks: Any) -> str:
    return "".join(chunk["choices"][0]["text"] for chunk in chunks)


# --- the same class ------------------------------------------------------------------------------------------------


def test_importing_cppbatch_neither_imports_nor_changes_llama_cpp() -> None:
    code = (
        "import sys, cppbatch; assert 'llama_cpp' not in sys.modules; import llama_cpp as l; print(l.Llama.__module__)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "llama_cpp.llama"


def test_an_object_is_an_instance_of_the_original_class(opened: Open, tiny_llama: Path) -> None:
    llm = opened(tiny_llama)
    assert isinstance(llm, llama_cpp.Llama)
    assert "_ctx" not in vars(llm)


def test_the_vocabulary_and_the_sizes_are_those_of_the_original(opened: Open, tiny_chat: Path) -> None:
    ours, theirs = opened(tiny_chat), opened(tiny_chat, cls=llama_cpp.Llama)
    for name in ("n_ctx", "n_vocab", "n_embd", "token_bos", "token_eos", "token_nl", "pooling_type"):
        assert getattr(ours, name)() == getattr(theirs, name)(), name
    assert ours.metadata == theirs.metadata
    assert ours.chat_format == theirs.chat_format
    for prompt in PROMPTS:
        tokens = ours.tokenize(prompt.encode())
        assert tokens == theirs.tokenize(prompt.encode())
        assert ours.detokenize(tokens) == theirs.detokenize(tokens)
        assert ours.tokenizer().decode(tokens) == theirs.tokenizer().decode(tokens)
        for given in ({"add_bos": False, "special": True}, {"special": True}):
            tokens = ours.tokenize(b"<s>" + prompt.encode(), **given)
            assert tokens == theirs.tokenize(b"<s>" + prompt.encode(), **given)
            pieces = ours.detokenize(tokens, prev_tokens=[1], special=True)
            assert pieces == theirs.detokenize(tokens, prev_tokens=[1], special=True)


# --- completions ---------------------------------------------------------------------------------------------------


@pytest.mark.each_value
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"echo": True},
        {"stop": [" ", "e"]},
        {"stop": "th", "max_tokens": None},
        {"repeat_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
        {"logit_bias": {"70": 3.0, 71: -100.0}},
        {"model": "mine", "seed": 1},
        {"suffix": None, "max_tokens": 1},
    ],
)
def test_a_greedy_completion_is_that_of_llama_cpp_python(opened: Open, floats: Path, given: dict[str, Any]) -> None:
    ours, theirs = opened(floats), opened(floats, cls=llama_cpp.Llama)
    for prompt in PROMPTS:
        assert plain(ours(prompt, **GREEDY | given)) == plain(theirs(prompt, **GREEDY | given))
        tokens = theirs.tokenize(prompt.encode())
        assert plain(ours.create_completion(tokens, **GREEDY)) == plain(theirs.create_completion(tokens, **GREEDY))


@pytest.mark.parametrize("given", [{"logprobs": 3}, {"logprobs": 0}, {"logprobs": 2, "echo": True}])
def test_log_probabilities_are_those_of_the_original(opened: Open, tiny_llama: Path, given: dict[str, Any]) -> None:
    ours, theirs = opened(tiny_llama), opened(tiny_llama, cls=llama_cpp.Llama, logits_all=True)
    for prompt in PROMPTS:
        mine, original = (each(prompt, **GREEDY | given)["choices"][0] for each in (ours, theirs))
        assert mine["text"] == original["text"]
        mine, original = mine["logprobs"], original["logprobs"]
        assert list(mine) == list(original)
        assert mine["tokens"] == original["tokens"]
        assert mine["text_offset"] == original["text_offset"]
        for one, other in zip(mine["token_logprobs"], original["token_logprobs"], strict=True):
            assert one is other is None or one == pytest.approx(float(other), abs=1e-3)
        for top, other in zip(mine["top_logprobs"], original["top_logprobs"], strict=True):
            assert top is other is None or top == pytest.approx({k: float(v) for k, v in other.items()}, abs=1e-3)


@pytest.mark.parametrize(
    "given", [{"top_k": 1}, {"top_p": 0.0}, {"min_p": 1.0}, {"typical_p": 0.0, "top_k": 0}, {"temperature": 1e-4}]
)
def test_samplers_that_leave_one_token_give_the_originals_text(
    opened: Open, tiny_llama: Path, given: dict[str, Any]
) -> None:
    ours, theirs = opened(tiny_llama), opened(tiny_llama, cls=llama_cpp.Llama)
    wanted = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "max_tokens": 16} | given
    for prompt in PROMPTS:
        assert ours(prompt, **wanted)["choices"] == theirs(prompt, **wanted)["choices"]


def test_the_other_sampling_arguments_reach_the_engine(opened: Open, tiny_llama: Path) -> None:
    llm = opened(tiny_llama, last_n_tokens_size=7)
    defaults = {p.name: p.default for p in inspect.signature(llm.create_completion).parameters.values()}
    given = {"mirostat_mode": 2, "mirostat_tau": 3.0, "mirostat_eta": 0.2, "temperature": 0.5}
    params, _ = llm.sampling(defaults | given)
    assert (params.mirostat, params.mirostat_tau, params.mirostat_eta, params.temperature) == (2, 3.0, 0.2, 1.0)
    assert (params.penalty_last_n, params.penalize_prompt) == (7, False)
    params, _ = llm.sampling(defaults | {"temperature": -1.0, "presence_penalty": 3.0, "logit_bias": {5: -1e9}})
    assert (params.samplers, params.presence_penalty, params.logit_bias) == (("penalties",), 2.0, {5: -100.0})


def test_a_stream_is_the_same_text_in_chunks_of_the_same_form(opened: Open, tiny_llama: Path) -> None:
    ours, theirs = opened(tiny_llama), opened(tiny_llama, cls=llama_cpp.Llama)
    for prompt in ["the cat " * 3, "1+1="]:
        chunks, original = ([*each(prompt, **GREEDY, stream=True)] for each in (ours, theirs))
        assert text(chunks) == text(original)
        assert plain(chunks[0]).keys() == plain(original[0]).keys()
        assert plain(chunks[-1]) == plain(original[-1])
        assert len({chunk["id"] for chunk in chunks}) == 1
    scored = list(ours("Hello", **GREEDY, stream=True, logprobs=1))
    assert all(len(chunk["choices"][0]["logprobs"]["tokens"]) == 1 for chunk in scored[:-1])


def test_a_stream_that_is_closed_frees_its_cells(opened: Open, tiny_llama: Path) -> None:
    llm = opened(tiny_llama)
    stream = llm("Hello", max_tokens=100, stream=True)
    next(stream)
    stream.close()
    assert llm.engine.stats().running == 0


def test_a_stream_holds_its_object(tiny_llama: Path) -> None:
    def ask() -> Any:
        return Llama(str(tiny_llama), n_threads=1, verbose=False)("Hello", max_tokens=40, stream=True)

    stream = ask()
    next(stream)
    gc.collect()
    assert list(stream)[-1]["choices"][0]["finish_reason"] == "length"


def test_an_unreferenced_object_is_closed_at_once(tiny_llama: Path) -> None:
    gc.disable()
    try:
        llm = Llama(str(tiny_llama), n_threads=1, verbose=False)
        llm("Hello", max_tokens=2)
        engine = llm.engine
        del llm
        assert engine.core.is_closed
    finally:
        gc.enable()


def test_a_closed_object_says_so(tiny_llama: Path) -> None:
    llm = Llama(str(tiny_llama), n_threads=1, verbose=False)
    llm.close()
    for call in (lambda: llm("Hello"), lambda: llm([1, 2]), lambda: llm.tokenize(b"Hello"), lambda: llm.engine):
        with pytest.raises(EngineClosed, match="this Llama object is closed"):
            call()
    llm.close()


def test_sixteen_threads_get_the_texts_of_one_in_fewer_steps(opened: Open, floats: Path) -> None:
    llm = opened(floats)
    prompts = [f"{i} {PROMPTS[i % 6]}" for i in range(16)]

    def answer(prompt: str) -> str:
        return str(llm(prompt, **GREEDY)["choices"][0]["text"])

    alone = [answer(prompt) for prompt in prompts]
    n_alone = llm.engine.stats().steps
    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(answer, prompts))
    assert together == alone
    assert llm.engine.stats().steps - n_alone < n_alone / 2


def test_a_prompt_that_fills_the_context_is_refused_as_in_llama_cpp_python(opened: Open, tiny_llama: Path) -> None:
    llm = opened(tiny_llama, n_ctx=32)
    with pytest.raises(ValueError, match=r"Requested tokens \(40\) exceed context window of 32"):
        llm([70] * 40)
    assert llm([70] * 30, temperature=0.0, max_tokens=-1)["usage"]["completion_tokens"] == 2


def test_an_object_without_a_seed_gives_the_same_series_every_time(opened: Open, tiny_llama: Path) -> None:
    series = [
        [llm("Hello", max_tokens=8)["choices"][0]["text"] for _ in range(3)]
        for llm in (opened(tiny_llama, seed=7), opened(tiny_llama, seed=7))
    ]
    assert series[0] == series[1]
    assert len(set(series[0])) == 3
    llm = opened(tiny_llama)
    llm.set_seed(7)
    state = llm.save_state()
    assert [llm("Hello", max_tokens=8)["choices"][0]["text"] for _ in range(3)] == series[0]
    llm.load_state(pickle.loads(pickle.dumps(state)))
    assert llm("Hello", max_tokens=8)["choices"][0]["text"] == series[0][0]
    assert llm("Hello", max_tokens=8, seed=1) | {"id": 0} == llm("Hello", max_tokens=8, seed=1) | {"id": 0}


@pytest.mark.parametrize("seed", [-1, 2**32 - 1])
@pytest.mark.parametrize("cls", [Llama, llama_cpp.Llama])
def test_the_seed_of_llama_cpp_for_random_texts_gives_random_texts(
    opened: Open, tiny_llama: Path, cls: Any, seed: int
) -> None:
    llm, again = opened(tiny_llama, cls=cls), opened(tiny_llama, cls=cls, seed=seed)
    hot = {"max_tokens": 12, "temperature": 2.0, "top_k": 0, "top_p": 1.0}
    assert len({llm("Hello", seed=seed, **hot)["choices"][0]["text"] for _ in range(4)}) == 4
    series = [again("Hello", **hot)["choices"][0]["text"] for _ in range(2)]
    again.set_seed(seed)
    assert series == [again("Hello", **hot)["choices"][0]["text"] for _ in range(2)]  # not random, as in the original


# --- functions and grammars ----------------------------------------------------------------------------------------


def test_a_logits_processor_sees_and_changes_what_the_original_shows_it(opened: Open, tiny_llama: Path) -> None:
    def run(cls: Any) -> tuple[list[list[int]], str]:
        seen: list[list[int]] = []

        def only_even(input_ids: Any, scores: Any) -> Any:
            assert scores.dtype == np.float32
            seen.append(input_ids.tolist())
            scores[1::2] = -np.inf
            return scores

        llm = opened(tiny_llama, cls=cls)
        processors = llama_cpp.LogitsProcessorList([only_even])
        return seen, llm("Hello", temperature=0.0, max_tokens=6, logits_processor=processors)["choices"][0]["text"]

    assert run(Llama) == run(llama_cpp.Llama)


def test_an_exception_in_a_processor_is_raised_only_to_its_caller(opened: Open, tiny_llama: Path) -> None:
    def broken(input_ids: Any, scores: Any) -> Any:
        raise KeyError("mine")

    def calls_itself(input_ids: Any, scores: Any) -> Any:
        return llm("Hello", max_tokens=1)

    llm = opened(tiny_llama)
    for forbidden in (calls_itself, lambda input_ids, scores: llm.close()):
        with pytest.raises(RuntimeError, match="cannot use or close the same engine"):
            llm("Hello", logits_processor=llama_cpp.LogitsProcessorList([forbidden]))
    with pytest.raises(KeyError, match="mine"):
        llm("Hello", logits_processor=llama_cpp.LogitsProcessorList([broken]))
    assert llm("Hello", max_tokens=2)["usage"]["completion_tokens"] == 2


def test_stopping_criteria_end_a_text_where_the_original_ends_it(opened: Open, tiny_llama: Path) -> None:
    n_prompt = 6

    def run(cls: Any, **given: Any) -> Any:
        criteria = llama_cpp.StoppingCriteriaList([lambda tokens, logits: len(tokens) >= n_prompt + 5])
        return opened(tiny_llama, cls=cls)("Hello", **GREEDY, stopping_criteria=criteria, **given)

    whole = plain(run(llama_cpp.Llama))
    assert whole["usage"]["completion_tokens"] == 5
    assert plain(run(Llama)) == whole
    chunks = list(run(Llama, stream=True))
    assert text(chunks) == whole["choices"][0]["text"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_a_grammar_constrains_the_text(opened: Open, tiny_llama: Path) -> None:
    llm = opened(tiny_llama)
    either = llama_cpp.LlamaGrammar.from_string('root ::= "true" | "false"', verbose=False)
    assert {llm("Hello", grammar=either, seed=i)["choices"][0]["text"] for i in range(12)} <= {"true", "false"}
    schema = llama_cpp.LlamaGrammar.from_json_schema(json.dumps(CITY), verbose=False)
    answer = llm("Hello", grammar=schema, max_tokens=128, temperature=0.0)["choices"][0]["text"]
    assert json.loads(answer)["city"] in ("Paris", "Rome")


# --- generate ------------------------------------------------------------------------------------------------------


def test_generate_yields_the_tokens_of_the_original(opened: Open, tiny_llama: Path) -> None:
    def run(cls: Any) -> list[int]:
        llm = opened(tiny_llama, cls=cls)
        tokens = llm.tokenize(b"Hello")
        return [token for token, _ in zip(llm.generate(tokens, temp=0.0), range(20), strict=False)]

    assert run(Llama) == run(llama_cpp.Llama)


def test_generate_ends_with_the_end_token(opened: Open, tiny_llama: Path) -> None:
    llm = opened(tiny_llama)

    def end(input_ids: Any, scores: Any) -> Any:
        scores[llm.token_eos()] = 1000.0 * (len(input_ids) > 8)
        return scores

    processors = llama_cpp.LogitsProcessorList([end])
    tokens = list(llm.generate(llm.tokenize(b"Hello"), temp=0.0, logits_processor=processors))
    assert len(tokens) == 4
    assert tokens[-1] == llm.token_eos()


def test_low_level_members_work_on_a_separate_context(opened: Open, tiny_llama: Path) -> None:
    ours, theirs = (opened(tiny_llama, cls=cls, logits_all=True) for cls in (Llama, llama_cpp.Llama))
    tokens = theirs.tokenize(b"Hello")
    for llm in (ours, theirs):
        llm.eval(tokens)
    assert ours.n_tokens == theirs.n_tokens == len(tokens)
    assert list(ours.eval_tokens) == list(theirs.eval_tokens) == tokens
    np.testing.assert_allclose(ours.scores[: len(tokens)], theirs.scores[: len(tokens)], atol=1e-3)
    assert ours.sample(temp=0.0) == theirs.sample(temp=0.0)
    state = ours.save_state()
    ours.reset()
    assert ours.n_tokens == 0
    ours.load_state(state)
    assert ours.n_tokens == len(tokens)
    first = [next(llm.generate([70], temp=0.0, reset=False)) for llm in (ours, theirs)]
    assert first[0] == first[1]
    assert ours("Hello", **GREEDY)["choices"] == theirs("Hello", **GREEDY)["choices"]


# --- chats ---------------------------------------------------------------------------------------------------------


@pytest.mark.each_value
@pytest.mark.parametrize("chat_format", [None, "chatml", "llama-2", "llama-3", "vicuna", "chatml-function-calling"])
def test_an_answer_in_any_format_is_that_of_the_original(opened: Open, floats: Path, chat_format: str | None) -> None:
    ours, theirs = (opened(floats, cls=cls, chat_format=chat_format) for cls in (Llama, llama_cpp.Llama))
    conversation = [{"role": "system", "content": "Be brief."}, *QUESTION]
    for messages in (QUESTION, conversation):
        mine, original = (plain(each.create_chat_completion(messages, **GREEDY)) for each in (ours, theirs))
        assert mine == original
        streams = ([*each.create_chat_completion(messages, **GREEDY, stream=True)] for each in (ours, theirs))
        contents = ["".join(c["choices"][0]["delta"].get("content", "") for c in chunks) for chunks in streams]
        assert contents == [original["choices"][0]["message"]["content"]] * 2


def test_a_tool_that_must_be_called_is_a_call_in_the_originals_form(opened: Open, tiny_chat: Path) -> None:
    llm = opened(tiny_chat, n_ctx=1024)
    choice = {"type": "function", "function": {"name": "weather"}}
    functions = {"functions": [TOOLS[0]["function"]], "function_call": {"name": "weather"}}
    for given in ({"tools": TOOLS, "tool_choice": choice}, functions):
        answer = llm.create_chat_completion(QUESTION, **given, temperature=0.0)["choices"][0]
        assert answer["finish_reason"] == "tool_calls"
        (call,) = answer["message"]["tool_calls"]
        assert call["function"]["name"] == "weather"
        assert json.loads(call["function"]["arguments"])["city"] in ("Paris", "Rome")
        assert answer["message"]["function_call"] == call["function"]
        chunks = list(llm.create_chat_completion(QUESTION, **given, temperature=0.0, stream=True))
        calls = [part for chunk in chunks for part in chunk["choices"][0]["delta"].get("tool_calls", ())]
        assert "".join(part["function"]["arguments"] for part in calls) == call["function"]["arguments"]
        assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    "wanted",
    [{"type": "json_object", "schema": CITY}, {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}],
)
def test_a_response_format_makes_the_content_json(opened: Open, tiny_chat: Path, wanted: dict[str, Any]) -> None:
    llm = opened(tiny_chat, n_ctx=1024)
    answer = llm.create_chat_completion(QUESTION, response_format=wanted, temperature=0.0)
    assert json.loads(answer["choices"][0]["message"]["content"])["city"] in ("Paris", "Rome")


def test_an_answer_has_log_probabilities_in_openais_form(opened: Open, tiny_chat: Path) -> None:
    llm = opened(tiny_chat, n_ctx=1024)
    for given in ({}, {"response_format": {"type": "json_object", "schema": CITY}}):
        answer = llm.create_chat_completion(QUESTION, **GREEDY, logprobs=True, top_logprobs=2, **given)["choices"][0]
        entries = answer["logprobs"]["content"]
        assert "".join(entry["token"] for entry in entries).startswith(answer["message"]["content"][:5])
        assert all(len(entry["top_logprobs"]) >= 2 for entry in entries[:2])


def test_answers_are_openais_objects_too(opened: Open, tiny_chat: Path) -> None:
    llm = opened(tiny_chat, n_ctx=1024)
    assert llm.create_chat_completion_openai_v1(QUESTION, **GREEDY).choices[0].message.content
    assert list(llm.create_chat_completion_openai_v1(QUESTION, **GREEDY, stream=True))[-1].choices[0].finish_reason
    called = llm.create_chat_completion_openai_v1(QUESTION, tools=TOOLS, tool_choice="required", temperature=0.0)
    assert called.choices[0].message.tool_calls[0].function.name == "weather"


def test_a_handler_for_images_becomes_a_projector(opened: Open, tiny_chat: Path, tiny_folder: Path) -> None:
    handler = llama_cpp.llama_chat_format.Llava15ChatHandler(
        str(tiny_projectors.vision(tiny_folder / "eyes.gguf")), verbose=False
    )
    llm = opened(tiny_chat, n_ctx=1024, chat_handler=handler)

    def ask(color: tuple[int, int, int]) -> dict[str, Any]:
        picture = {"type": "image_url", "image_url": {"url": as_url(png(color=color))}}
        messages = [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, picture]}]
        return dict(llm.create_chat_completion(messages, **GREEDY))

    with ThreadPoolExecutor(4) as pool:
        red, blue, red_again, blue_again = pool.map(ask, [(255, 0, 0), (0, 0, 255)] * 2)
    assert red["choices"] == red_again["choices"] != blue["choices"]
    assert blue["choices"] == blue_again["choices"]
    assert red["usage"]["completion_tokens"] == 24
    assert llm.engine.stats().media_encoded == 2


# --- vectors -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pooling", [llama_cpp.LLAMA_POOLING_TYPE_MEAN, llama_cpp.LLAMA_POOLING_TYPE_LAST])
def test_vectors_are_pooled_as_the_caller_says(opened: Open, tiny_llama: Path, pooling: int) -> None:
    ours, theirs = (
        opened(tiny_llama, cls=cls, embedding=True, pooling_type=pooling) for cls in (Llama, llama_cpp.Llama)
    )
    np.testing.assert_allclose(ours.embed("Hello"), theirs.embed("Hello"), atol=1e-4)
    assert ours.pooling_type() == theirs.pooling_type() == pooling


@pytest.mark.parametrize("normalize", [False, True])
def test_vectors_are_those_of_the_original(opened: Open, tiny_encoder: Path, normalize: bool) -> None:
    ours, theirs = (opened(tiny_encoder, cls=cls, embedding=True) for cls in (Llama, llama_cpp.Llama))
    mine, original = (each.embed(PROMPTS, normalize=normalize, return_count=True) for each in (ours, theirs))
    np.testing.assert_allclose(mine[0], original[0], atol=1e-4)
    assert mine[1] == original[1]
    mine, original = (each.create_embedding("Hello") for each in (ours, theirs))
    np.testing.assert_allclose(mine["data"][0].pop("embedding"), original["data"][0].pop("embedding"), atol=1e-4)
    assert mine == original
    assert ours.pooling_type() == theirs.pooling_type()


def test_a_model_that_writes_gives_vectors_of_tokens_and_texts(opened: Open, tiny_llama: Path) -> None:
    ours, theirs = (opened(tiny_llama, cls=cls, embedding=True) for cls in (Llama, llama_cpp.Llama))
    mine, original = ours.embed("Hello"), theirs.embed("Hello")
    np.testing.assert_allclose(mine, original, atol=1e-4)
    assert ours("Hello", **GREEDY)["choices"] == opened(tiny_llama)("Hello", **GREEDY)["choices"]
    with pytest.raises(ValueError, match="exceed batch size of 16"):
        opened(tiny_llama, embedding=True, n_batch=16, n_ubatch=16, n_gpu_layers=0).embed("x" * 40, truncate=False)
    with pytest.raises(RuntimeError, match="embedding=True"):
        opened(tiny_llama).embed("Hello")


# --- other arguments -----------------------------------------------------------------------------------------------


def test_numa_is_whether_to_distribute_threads_or_a_number_of_llama_cpp() -> None:
    given = {True: "distribute", 2: "isolate", 3: "numactl"}
    assert {numa: engine_settings({"numa": numa})["numa"] for numa in given} == given
    assert "numa" not in engine_settings({"numa": False})


def test_an_adapter_changes_the_text_as_in_the_original(opened: Open, tiny_llama: Path, tiny_folder: Path) -> None:
    adapter = str(write_lora(tiny_folder / "llama-cpp-python-lora.gguf", seed=1))
    ours, theirs = (opened(tiny_llama, cls=cls, lora_path=adapter, lora_scale=0.5) for cls in (Llama, llama_cpp.Llama))
    for prompt in PROMPTS:
        assert ours(prompt, **GREEDY)["choices"] == theirs(prompt, **GREEDY)["choices"]
    assert ours("Hello", **GREEDY)["choices"] != opened(tiny_llama)("Hello", **GREEDY)["choices"]


def test_positions_are_scaled_as_in_the_original(opened: Open, tiny_llama: Path) -> None:
    yarn = {"yarn_ext_factor": 1.0, "yarn_attn_factor": 1.1, "yarn_beta_fast": 16.0, "yarn_beta_slow": 2.0}
    scaled = {"rope_freq_base": 500.0, "rope_freq_scale": 0.5, "rope_scaling_type": 2, "yarn_orig_ctx": 64}
    given = yarn | scaled | {"attention_type": 0, "offload_kqv": False, "op_offload": False, "swa_full": True}
    ours, theirs = (opened(tiny_llama, cls=cls, **given) for cls in (Llama, llama_cpp.Llama))
    for prompt in PROMPTS:
        assert ours(prompt, **GREEDY)["choices"] == theirs(prompt, **GREEDY)["choices"]
    assert ours("x" * 70, **GREEDY)["choices"] != opened(tiny_llama)("x" * 70, **GREEDY)["choices"]


def test_prompt_lookup_drafts_the_text_without_changing_it(opened: Open, tiny_llama: Path) -> None:
    draft = llama_cpp.llama_speculative.LlamaPromptLookupDecoding(num_pred_tokens=4)
    llm = opened(tiny_llama, draft_model=draft)
    assert llm.engine.config.spec == "suffix"
    assert llm.engine.config.draft_max == 4
    assert llm("the cat " * 3, **GREEDY)["choices"] == opened(tiny_llama)("the cat " * 3, **GREEDY)["choices"]


def test_settings_of_the_engine_may_be_given_and_unknown_ones_do_nothing(opened: Open, tiny_llama: Path) -> None:
    llm = opened(tiny_llama, n_parallel=3, f16_kv=True)
    assert llm.engine.config.n_parallel == 3
    overrides = {"a": 1, "b": True, "c": 0.5, "d": "x"}
    llm = opened(tiny_llama, kv_overrides=overrides)
    assert llm.engine.config.kv_overrides == ("a=int:1", "b=bool:true", "c=float:0.5", "d=str:x")
    with pytest.raises(ConfigError, match="kv_overrides"):
        opened(tiny_llama, kv_overrides={"a": None})
    with pytest.raises(ValueError, match="Model path does not exist"):
        opened(Path("nowhere.gguf"))


def test_a_vocabulary_alone_reads_and_writes_tokens(opened: Open, tiny_folder: Path) -> None:
    llm = opened(tiny_models.vocab_only(tiny_folder / "vocab.gguf"), vocab_only=True)
    assert llm.detokenize(llm.tokenize(b"Hello")) == b"Hello"
    with pytest.raises(RuntimeError, match="vocab_only"):
        llm("Hello")


def test_a_pickled_object_reloads_its_model(opened: Open, tiny_llama: Path) -> None:
    llm = opened(tiny_llama, n_parallel=2)
    again = pickle.loads(pickle.dumps(llm))
    assert again("Hello", **GREEDY)["choices"] == llm("Hello", **GREEDY)["choices"]
    assert again.engine.config == llm.engine.config
    again.close()


def test_closing_ends_the_requests_of_other_threads(opened: Open, tiny_llama: Path) -> None:
    llm = opened(tiny_llama)
    ended = threading.Event()

    def run() -> None:
        with pytest.raises(GenerationFailed):
            llm("Hello", max_tokens=200, logits_processor=llama_cpp.LogitsProcessorList([lambda ids, scores: scores]))
        ended.set()

    thread = threading.Thread(target=run)
    thread.start()
    while not llm.engine.stats().running:
        pass
    llm.close()
    thread.join(10)
    assert ended.is_set()
    llm.close()


def test_wrong_arguments_are_errors_that_name_them(opened: Open, tiny_llama: Path) -> None:
    llm = opened(tiny_llama)
    with pytest.raises(TypeError, match="unknown"):
        llm("Hello", unknown=1)
    with pytest.raises(InvalidRequest, match="logprobs"):
        llm("Hello", logprobs=21)


def test_a_model_of_the_hub_is_fetched_by_a_pattern(
    opened: Open, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CPPBATCH_MODELS", str(tmp_path))
    files = {"tiny-F16.gguf": b"", "tiny-F32.gguf": tiny_llama.read_bytes()}
    with FakeHub({"someone/tiny-GGUF": files}).running() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        llm = Llama.from_pretrained("someone/tiny-GGUF", "*F32.gguf", **EXACT)
    assert Path(llm.model_path) == tmp_path / "someone/tiny-GGUF/tiny-F32.gguf"
    assert llm("Hello", **GREEDY)["choices"] == opened(tiny_llama)("Hello", **GREEDY)["choices"]
    llm.close()


# --- in the place of the original ----------------------------------------------------------------------------------


def test_a_patch_puts_our_class_in_the_place_of_the_original_until_it_is_undone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    importing: Any = ModuleType("importing")  # a module that is imported meanwhile
    monkeypatch.setitem(sys.modules, "importing", importing)
    original = llama_cpp.Llama
    with cppbatch.patch():
        assert llama_cpp.Llama is llama_cpp.llama.Llama
        assert issubclass(llama_cpp.Llama, Llama)
        exec("from cppbatch import Llama as explicit\nfrom llama_cpp import Llama as imported", importing.__dict__)
        assert importing.imported is llama_cpp.Llama
    assert llama_cpp.Llama is llama_cpp.llama.Llama is importing.imported is original
    assert importing.explicit is Llama, "it was not imported from llama_cpp"
    patched = cppbatch.patch()
    assert issubclass(llama_cpp.Llama, Llama)
    patched.undo()
    assert llama_cpp.Llama is original
    assert globals()["Llama"] is cppbatch.Llama is not original  # imported from cppbatch, before and by its own name


@pytest.mark.parametrize("as_module", [False, True])
def test_a_program_runs_with_our_class(tiny_llama: Path, tmp_path: Path, as_module: bool) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\nfrom llama_cpp import Llama\n"
        "llm = Llama(sys.argv[1], n_threads=1, verbose=False)\n"
        "print(type(llm).__mro__[1].__module__, len(llm('Hello', max_tokens=3)['choices'][0]['text']) > 0)\n"
    )
    named = ["-m", "program"] if as_module else [str(program)]
    command = [sys.executable, "-m", "cppbatch.patched", *named, str(tiny_llama)]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.stdout.strip() == "cppbatch.llama_cpp_python.llama True", ended.stderr


# --- every argument ------------------------------------------------------------------------------------------------

PAGE = (Path(__file__).parents[2] / "docs/llama-cpp-python.md").read_text("utf-8")
TABLES = {name for row in re.findall(r"^\| (.*?) \|", PAGE, re.MULTILINE) for name in re.findall(r"`(\w+)", row)}
TESTED = set(re.findall(r"\b(\w+)(?:=|\": )", Path(__file__).read_text("utf-8")))
METHODS = [name for name, value in vars(llama_cpp.Llama).items() if callable(value) and not name.startswith("_")]


@pytest.mark.parametrize("name", ["__init__", "__call__", "from_pretrained", *METHODS])
def test_each_argument_is_taken_and_tested_here_or_named_in_the_table(name: str) -> None:
    ours, theirs = (inspect.signature(getattr(cls, name)) for cls in (Llama, llama_cpp.Llama))
    assert [(p.name, p.default, p.kind) for p in ours.parameters.values()] == [
        (p.name, p.default, p.kind) for p in theirs.parameters.values()
    ]
    given = {p.name for p in theirs.parameters.values()} - {"self", "args"}
    assert given - TABLES - TESTED - POSITIONAL == set()


POSITIONAL = {
    "model_path", "prompt", "messages", "tokens", "text", "input", "idx", "state", "cache", "logits", "axis", "a", "b",
    "repo_id", "filename",
}  # fmt: skip
"""Arguments that the tests give by their place."""
