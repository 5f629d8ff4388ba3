"""Structured output on tiny models: texts match, bad grammars are refused, forced tokens only save time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import monotonic, sleep, thread_time
from typing import Any

import msgspec
import numpy as np
import pytest
from llguidance import LLParserLimits

from cppbatch import (
    BatchInferenceEngine,
    FinishReason,
    GenerationEvent,
    GenerationRequest,
    InvalidRequest,
    SamplingParams,
)
from cppbatch.cluster.engines.local import LocalEngine
from cppbatch.engine.grammar import grammar_check, grammar_child, structured_output
from cppbatch.engine.sequence import Seq
from cppbatch.errors import EngineClosed
from cppbatch.models.synthetic import IM_START
from tests.support.fakes import drain, greedy
from tests.support.fixtures import shared_engine
from tests.support.schemas import SCHEMAS, fault
from tests.unit.test_forced_tokens import PROMPT, one, text_of

SETTINGS: dict[str, Any] = {
    "n_ctx": 4096,
    "n_parallel": 8,
    "n_batch": 64,
    "n_threads": 1,
    "flash_attn": "off",
    "prefix_cache": False,
}

ENDS = (FinishReason.STOP, FinishReason.LENGTH)

Fields = dict[str, Any]

engine = shared_engine(**SETTINGS)


def prepare(engine: BatchInferenceEngine, **fields: Any) -> Seq:
    return engine.prepare(GenerationRequest(id="prepared", prompt=PROMPT, params=SamplingParams(**fields)))


PERSON = SCHEMAS["an object"][1]

GBNF = 'root ::= ("ab" | item+) "!"\nitem ::= [c-e] digit{1,2} | "é"\ndigit ::= [0-9]'

LARK = 'start: pair ("," pair)*\npair: KEY "=" VALUE\nKEY: /[a-f]{1,3}/\nVALUE: /[0-9]{1,2}/ | "日本"'

CHOICES = ["yes", "yes, please", "no", '"quoted" \\ /a|b/i', "new\nline", "🙂 é"]


def is_(regex: str) -> Callable[[str], bool]:
    return lambda text: re.fullmatch(regex, text) is not None


def is_object(text: str) -> bool:
    return isinstance(json.loads(text), dict)


KINDS: dict[str, tuple[Fields, Callable[[str], bool]]] = {
    "a schema": ({"json_schema": PERSON}, lambda text: fault(text, PERSON) is None),
    "a schema as text": ({"json_schema": json.dumps(PERSON)}, lambda text: fault(text, PERSON) is None),
    "any object": ({"json_schema": {"type": "object"}}, is_object),
    "any JSON": ({"json_schema": True}, lambda text: fault(text, {}) is None),
    "a regular expression": ({"guided_regex": r"[a-f]{2,5}-\d{3}/(é|日本)?"}, is_(r"[a-f]{2,5}-\d{3}/(é|日本)?")),
    "a choice": ({"guided_choice": CHOICES}, lambda text: text in CHOICES),
    "GBNF": ({"grammar": GBNF}, is_(r"(ab|([c-e][0-9]{1,2}|é)+)!")),
    "Lark": ({"grammar": LARK}, is_(r"[a-f]{1,3}=([0-9]{1,2}|日本)(,[a-f]{1,3}=([0-9]{1,2}|日本))*")),
}

WAYS: dict[str, Fields] = {
    "greedy": {"temperature": 0},
    "drawn": {"temperature": 1.5, "top_k": 0, "top_p": 1, "min_p": 0},
    "penalties": {"repetition_penalty": 1.5, "presence_penalty": 2, "frequency_penalty": 2},
    "DRY": {"dry_multiplier": 2, "dry_allowed_length": 1},
    "XTC": {"xtc_probability": 1, "xtc_threshold": 0.01},
    "typical": {"typical_p": 0.5},
    "top-n-sigma": {"top_n_sigma": 1},
    "dynamic temperature": {"dynatemp_range": 0.5},
    "mirostat 1": {"mirostat": 1},
    "mirostat 2": {"mirostat": 2},
    "adaptive": {"adaptive_target": 0.3},
    "log-probabilities": {"logprobs": 3},
    "biases": {"logit_bias": {str(token): 100 for token in range(5)}},
    "a processor": {"logits_processor": lambda tokens, _: np.random.default_rng(len(tokens)).normal(size=512)},
}


# --- what comes out matches ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_every_kind_of_grammar_is_kept_to_however_tokens_are_chosen(engine: BatchInferenceEngine, way: Fields) -> None:
    kinds = [kind for kind in KINDS for _ in range(2)]
    params = [SamplingParams(max_tokens=100, seed=i, **way, **KINDS[kind][0]) for i, kind in enumerate(kinds)]
    results = engine.generate([PROMPT] * len(params), params)
    finished = []
    for kind, result in zip(kinds, results, strict=True):
        assert result.finish_reason in ENDS, result.error
        if result.finish_reason is FinishReason.STOP:
            assert KINDS[kind][1](result.text), (kind, result.text)
            finished.append(kind)
    assert {"a schema", "a regular expression", "a choice"} <= set(finished)


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_grammar_finishes_at_times(engine: BatchInferenceEngine, kind: str) -> None:
    params = [SamplingParams(max_tokens=100, seed=i, temperature=1.5, **KINDS[kind][0]) for i in range(8)]
    results = engine.generate([PROMPT] * len(params), params)
    assert FinishReason.STOP in [result.finish_reason for result in results]
    assert len({result.text for result in results}) > 1


def test_a_constrained_text_is_the_same_alone_and_in_a_batch(engine: BatchInferenceEngine) -> None:
    params = [greedy(60, **fields) for fields, _ in KINDS.values()]
    together = engine.generate([PROMPT] * len(params), params)
    assert [one(engine, its).text for its in params] == [result.text for result in together]


def test_choices_of_one_prompt_share_a_grammar_and_each_is_its_own_text(engine: BatchInferenceEngine) -> None:
    params = SamplingParams(guided_regex="[a-z]{12}", temperature=2, seed=-1, max_tokens=20)
    texts = [result.text for result in engine.generate([PROMPT], params, n=16)]
    assert all(re.fullmatch("[a-z]{12}", text) for text in texts)
    assert len(set(texts)) > 8


def test_properties_come_in_the_order_of_the_schema(engine: BatchInferenceEngine) -> None:
    properties = {name: {"const": i} for i, name in enumerate("zbya")}
    schema = {"type": "object", "properties": properties, "required": list("abyz"), "additionalProperties": False}
    assert list(json.loads(one(engine, greedy(80, json_schema=schema)).text)) == list("zbya")


def test_a_stream_gives_the_text_piece_by_piece(engine: BatchInferenceEngine) -> None:
    params = greedy(80, json_schema={"const": "日本 🙂 and the rest"})
    events = list(engine.stream(PROMPT, params))
    assert json.loads("".join(event.text for event in events)) == "日本 🙂 and the rest"
    assert sum(len(event.tokens) for event in events) == events[-1].usage.completion_tokens  # type: ignore[union-attr]


def test_an_echoed_prompt_precedes_the_text(engine: BatchInferenceEngine) -> None:
    assert one(engine, greedy(20, guided_choice=["answer"], echo=True)).text == PROMPT + "answer"


# --- bad grammars ----------------------------------------------------------------------------------------------------


NESTED = {"type": "integer"}

for _ in range(400):
    NESTED = {"type": "array", "items": NESTED, "minItems": 1}  # type: ignore[dict-item]

BAD: dict[str, tuple[Fields, str, str]] = {
    "a regex that is none": ({"guided_regex": "a(b"}, "guided_regex", "unclosed group"),
    "look-around": ({"guided_regex": "(?=a)b"}, "guided_regex", "look-around"),
    "a regex nothing matches": ({"guided_regex": r"a[^\x00-\U0010ffff]"}, "guided_regex", "."),
    "a regex with half a character": ({"guided_regex": "\ud800"}, "guided_regex", "."),
    "a regex of another type": ({"guided_regex": 5}, "guided_regex", "must be a string"),
    "a regex of a megabyte": ({"guided_regex": "a" * (1 << 20)}, "guided_regex", "1,048,576 characters; the limit is"),
    "GBNF with an unknown rule": ({"grammar": 'root ::= "a" foo'}, "grammar", "foo"),
    "GBNF without a root": ({"grammar": 'top ::= "a"'}, "grammar", "root"),
    "GBNF without an end": ({"grammar": 'root ::= root "a"'}, "grammar", "."),
    "GBNF that is nested deeply": ({"grammar": f"root ::= {'(' * 9999}{')' * 9999}"}, "grammar", "deep|recursion"),
    "Lark with an unknown name": ({"grammar": 'start: "a" FOO'}, "grammar", "FOO"),
    "Lark with an open string": ({"grammar": 'start: "a'}, "grammar", "."),
    "Lark that is nested deeply": ({"grammar": f'start: {"(" * 9999}"a"{")" * 9999}'}, "grammar", "deep"),
    "a grammar that is none": ({"grammar": "hello"}, "grammar", "."),
    "an empty grammar": ({"grammar": ""}, "grammar", "."),
    "a grammar of another type": ({"grammar": ["a"]}, "grammar", "must be a string"),
    "an unknown type": ({"json_schema": {"type": "text"}}, "json_schema", "text"),
    "a type of another type": ({"json_schema": {"type": 5}}, "json_schema", "type"),
    "an unsupported keyword": ({"json_schema": {"not": {"type": "string"}}}, "json_schema", "not"),
    "an unsupported format": ({"json_schema": {"type": "string", "format": "regex"}}, "json_schema", "regex"),
    "a megabyte": ({"json_schema": {"enum": ["x" * (1 << 20)]}}, "json_schema", r"1,048,\d{3} characters; the limit"),
    # Python 3.12 and later write the schema as text, and llguidance refuses it
    "a schema that is nested deeply": ({"json_schema": NESTED}, "json_schema", "nested too deeply|recursion limit"),
    "text that is nested deeply": (
        {"json_schema": '{"items":' * 10_000 + "{}" + "}" * 10_000},
        "json_schema",
        "nested too deeply",
    ),
    "text that is not JSON": ({"json_schema": "{'type': 'object'}"}, "json_schema", "is not valid JSON"),
    "JSON but not a schema": ({"json_schema": "[1, 2]"}, "json_schema", "a schema must be an object, true or false"),
    "a schema that is not JSON": ({"json_schema": {"enum": {1, 2}}}, "json_schema", "is not valid JSON"),
    "not a number": ({"json_schema": {"const": float("nan")}}, "json_schema", "is not valid JSON"),
    "no finite instance": (
        {"json_schema": {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}},
        "json_schema",
        "no finite JSON",
    ),
    "the schema false": ({"json_schema": False}, "json_schema", "no JSON|[Uu]nsatisfiable"),
    "bounds that exclude everything": (
        {"json_schema": {"type": "integer", "minimum": 5, "maximum": 3}},
        "json_schema",
        r"minimum \(5\) is greater than maximum \(3\)",
    ),
    "an empty enum": ({"json_schema": {"enum": []}}, "json_schema", "."),
    "a reference to nowhere": ({"json_schema": {"$ref": "#/$defs/a"}}, "json_schema", "/\\$defs/a"),
    "a reference to elsewhere": ({"json_schema": {"$ref": "https://example.com/a.json"}}, "json_schema", "example.com"),
    "a bad pattern": ({"json_schema": {"type": "string", "pattern": "a(b"}}, "json_schema", "unclosed group"),
    "half a character": ({"json_schema": r'{"const": "\ud800"}'}, "json_schema", "."),
    "no choice": ({"guided_choice": []}, "guided_choice", "at least one string"),
    "an empty choice": ({"guided_choice": ["a", ""]}, "guided_choice", "no empty strings"),
    "a choice of numbers": ({"guided_choice": [1, 2]}, "guided_choice", "list of strings"),
    "two grammars": ({"guided_regex": "a", "grammar": 'root ::= "a"'}, "grammar", "combined with guided_regex"),
}


@pytest.mark.parametrize(("fields", "field", "words"), BAD.values(), ids=BAD)
def test_a_bad_grammar_is_refused_with_its_field_and_one_clear_reason(
    engine: BatchInferenceEngine, fields: Fields, field: str, words: str
) -> None:
    for _ in range(2):
        with pytest.raises(InvalidRequest) as refusal:
            prepare(engine, **fields)
        message = str(refusal.value)
        assert refusal.value.field == field
        assert message.startswith(f"{field}: ")
        assert re.search(words, message.removeprefix(f"{field}: "))
        assert len(message) < 600
        assert "<" not in message.replace(str(fields[field]), ""), "llguidance's own marks"


def test_a_slow_grammar_takes_the_time_of_others_once(
    engine: BatchInferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammars = engine.core.inputs._grammars
    monkeypatch.setattr(grammars._quick, "_timeout_s", 0.1)
    params = SamplingParams(json_schema={"type": "integer", "multipleOf": 49_999})
    for is_first in (True, False):
        with pytest.raises(grammar_check.SlowGrammar):
            grammars.constraint(params, patient=False)
        monkeypatch.setattr(grammars._quick, "definition", lambda *_: pytest.fail("tried again"))
        assert is_first or grammars.constraint(params)
    assert grammars.constraint(params, patient=False)
    assert not grammars._slow


def test_a_model_that_cannot_end_a_text_has_no_grammars(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with BatchInferenceEngine(tiny_llama, **SETTINGS) as engine:
        monkeypatch.setattr(engine.core.runtime.vocab, "eog", frozenset())
        with pytest.raises(InvalidRequest, match="guided_choice: grammars require an end token, which this model's"):
            prepare(engine, guided_choice=["yes"])


def test_bad_grammars_change_nothing_for_a_neighbour_before_beside_or_after_them(engine: BatchInferenceEngine) -> None:
    params = [greedy(len(BAD) + 5, ignore_eos=True), greedy(len(BAD) + 5, guided_regex="[a-z ]{300}")]
    alone = [result.text for result in engine.generate([PROMPT] * 2, params)]
    names = [engine.add_request(PROMPT, its) for its in params]
    events = engine.step()
    for fields, *_ in BAD.values():
        with pytest.raises(InvalidRequest):
            engine.add_request(PROMPT, SamplingParams(**fields))
        events += engine.step()
    events += drain(engine)
    assert [text_of(events, name) for name in names] == alone
    assert [result.text for result in engine.generate([PROMPT] * 2, params)] == alone


# --- grammars that are large, or ask for much ------------------------------------------------------------------------


def properties(n: int, *, required: bool) -> Fields:
    names = {f"property_{i}": {"type": "integer"} for i in range(n)}
    return {
        "type": "object",
        "properties": names,
        "required": list(names) if required else [],
        "additionalProperties": False,
    }


HARD: dict[str, Fields] = {
    "repetitions of repetitions": {"guided_regex": "(a{1,1000}){1,1000}"},
    "50 times anything": {"guided_regex": "(.*a){50}"},
    "many letters": {"guided_regex": ".{100000}"},
    "many options": {"guided_regex": "(a?){5000}b"},
    "many alternatives": {"guided_regex": "|".join(f".*{i}.*" for i in range(3000))},
    "letters of all languages": {"guided_regex": r"(\p{L}|\p{N}){1,5000}x"},
    "a guess of how far it is to the end": {"guided_regex": "(.*[a-z].{30}x){5}"},
    "100 KB of choices": {"guided_choice": [f"choice number {i}" for i in range(5000)]},
    "a 100 KB enum": {"json_schema": {"enum": [f"value {i} of many" for i in range(5000)]}},
    "500 properties": {"json_schema": properties(500, required=True)},
    "500 optional properties": {"json_schema": properties(500, required=False)},
    "2000 optional properties": {"json_schema": properties(2000, required=False)},
    "a long array": {"json_schema": {"type": "array", "items": {"type": "integer"}, "minItems": 100_000}},
    "a long string": {"json_schema": {"type": "string", "minLength": 100_000}},
    "a multiple": {"json_schema": {"type": "integer", "multipleOf": 99_991}},
    "arrays in arrays": {"json_schema": json.loads('{"type":"array","minItems":1,"items":' * 100 + "{}" + "}" * 100)},
    "references that double": {
        "json_schema": {
            "$ref": "#/$defs/0",
            "$defs": {
                **{str(i): {"allOf": [{"$ref": f"#/$defs/{i + 1}"}] * 2} for i in range(30)},
                "30": {"type": "integer"},
            },
        }
    },
    "GBNF that never ends": {"grammar": 'root ::= "a" root'},
    "GBNF with more than one reading": {"grammar": 'root ::= root root | [a-z] | ""'},
    "Lark with more than one reading": {"grammar": "start: e\ne: e e e | e e | /[a-z]?/ | /[ab]/ | /./"},
    "Lark with many rules": {
        "grammar": "start: a0\n" + "".join(f'a{i}: "x" a{i + 1} | "y"\n' for i in range(3000)) + 'a3000: "z"'
    },
}  # fmt: skip


@pytest.mark.parametrize("fields", HARD.values(), ids=HARD)
def test_a_hard_grammar_stalls_no_other_request_and_ends_or_is_refused(
    engine: BatchInferenceEngine, fields: Fields
) -> None:
    beside = greedy(60, ignore_eos=True)
    alone = one(engine, beside).text
    neighbour = engine.add_request(PROMPT, beside)
    events, names, longest = engine.step(), [], 0.0
    began = thread_time()
    with contextlib.suppress(InvalidRequest):
        names = [engine.add_request(PROMPT, SamplingParams(seed=i, max_tokens=50, **fields)) for i in range(2)]
    assert thread_time() - began < 10  # CPU time: other processes do not matter
    while engine.has_work:
        began = thread_time()
        events += engine.step()
        longest = max(longest, thread_time() - began)
    assert longest < 2
    assert text_of(events, neighbour) == alone
    ended = [event for event in events if event.finish_reason and event.request_id in names]
    assert len(ended) == len(names)
    assert all(
        event.error if event.finish_reason is FinishReason.ERROR else event.finish_reason in ENDS for event in ended
    )


def limited(engine: BatchInferenceEngine, monkeypatch: pytest.MonkeyPatch, regex: str) -> SamplingParams:
    """A request with a grammar that soon needs more than it may."""
    few = LLParserLimits(max_lexer_states=1000, verbose_errors=False)
    monkeypatch.setattr(grammar_child, "LIMITS", few)
    params = SamplingParams(seed=3, max_tokens=200, temperature=2, top_k=0, guided_regex=regex)
    engine.prepare(GenerationRequest(id="prepared", prompt=PROMPT, params=params))
    return params


def test_a_text_that_the_grammars_limits_cut_off_is_not_reported_as_ended(
    engine: BatchInferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = limited(engine, monkeypatch, "([a-z ]*[aei][a-z ]{20}c)+")
    results = engine.generate([PROMPT] * 8, [msgspec.structs.replace(params, seed=i) for i in range(8)])
    assert {(result.finish_reason, bool(result.error)) for result in results} == {(FinishReason.ERROR, True)}


def test_grammar_limits_apply_to_each_request_separately(
    engine: BatchInferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = limited(engine, monkeypatch, "([a-z ]*[aeo][a-z ]{20}d)+")
    results = [one(engine, params) for _ in range(4)]
    assert len(results[0].tokens) > 5
    assert {(result.text, result.finish_reason) for result in results} == {(results[0].text, results[0].finish_reason)}


def test_a_grammar_that_would_take_hours_to_read_is_given_up(
    engine: BatchInferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.core.inputs._grammars._patient, "_cpu_s", 1.0)
    with pytest.raises(InvalidRequest, match=r"^json_schema: is too complex"):
        prepare(engine, json_schema={"type": "integer", "multipleOf": 99_999_989})
    assert one(engine, greedy(9, guided_regex="after that [0-9]")).text.startswith("after that ")


def test_closing_does_not_wait_for_a_grammar_that_is_being_read() -> None:
    checker = grammar_check.GrammarChecker()
    checker.definition("guided_regex", "ready")
    with ThreadPoolExecutor(1) as threads:
        reading = threads.submit(checker.definition, "json_schema", '{"type": "integer", "multipleOf": 99999989}')
        sleep(0.3)
        began = monotonic()
        checker.close()
        with pytest.raises(EngineClosed):
            reading.result()
    assert monotonic() - began < 5
    with pytest.raises(EngineClosed):
        checker.definition("guided_regex", "ready")


@pytest.mark.skipif(sys.platform == "win32", reason="there the time that passes is limited")
def test_a_grammar_is_not_given_up_because_other_programs_use_the_cores() -> None:
    checker = grammar_check.GrammarChecker(cpu_s=0.5)
    checker.definition("guided_regex", "ready")
    assert checker._child
    os.kill(checker._child.pid, signal.SIGSTOP)
    threading.Timer(1.0, os.kill, (checker._child.pid, signal.SIGCONT)).start()
    assert checker.definition("guided_regex", "continued")
    checker.close()


@pytest.mark.skipif(sys.platform == "win32", reason="there the time that passes is limited")
def test_a_grammar_that_gets_no_core_is_not_said_to_be_too_complex() -> None:
    checker = grammar_check.GrammarChecker(cpu_s=0.1, timeout_s=0.5)
    checker.definition("guided_regex", "ready")
    assert checker._child
    os.kill(checker._child.pid, signal.SIGSTOP)
    with pytest.raises(grammar_check.CheckFailed, match="other programs use the cores; try again"):
        checker.definition("guided_regex", "continued")
    checker.close()


def test_a_child_that_has_died_since_the_last_look_at_it_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    checker = grammar_check.GrammarChecker()
    checker.definition("guided_regex", "ready")
    assert checker._child
    checker._child.kill()
    checker._child.wait()
    monkeypatch.setattr(checker._child, "poll", lambda: None)
    assert checker.definition("guided_regex", "ready")
    checker.close()


async def test_closing_an_engine_on_a_thread_does_not_wait_for_a_grammar_that_is_being_read(tiny_llama: Path) -> None:
    params = SamplingParams(json_schema={"type": "integer", "multipleOf": 99_999_989})
    async with LocalEngine(tiny_llama, **SETTINGS) as engine:
        await engine.loaded()
        checking = asyncio.create_task(engine.check(GenerationRequest(id="slow", prompt=PROMPT, params=params)))
        await asyncio.sleep(0.5)
        began = monotonic()
    assert monotonic() - began < 5
    with pytest.raises(EngineClosed):
        await checking


async def test_requests_do_not_wait_for_slow_grammars_of_others(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(structured_output, "QUICK_S", 0.3)
    ended: list[str] = []

    async def answer(name: str, **fields: Any) -> GenerationEvent:
        timeout = 0.5 if name == "expires" else None
        params = SamplingParams(max_tokens=2, **fields)
        request = GenerationRequest(id=name, prompt=PROMPT, params=params, timeout=timeout)
        events: list[GenerationEvent] = [event async for event in engine.submit(request)]
        ended.append(name)
        return events[-1]

    async with LocalEngine(tiny_llama, **SETTINGS) as engine:
        await engine.loaded()
        slow = [
            asyncio.create_task(answer(name, json_schema={"type": "integer", "multipleOf": n}))
            for name, n in {"slow": 74_993, "expires": 74_989}.items()
        ]
        await asyncio.sleep(0.1)
        await answer("quick", guided_choice=["a quick one"])
        assert ended in (["quick"], ["expires", "quick"])
        reasons = [(await each).finish_reason for each in slow]
    assert reasons == [FinishReason.LENGTH, FinishReason.TIMEOUT]


@pytest.mark.usefixtures("no_gc_callbacks")
def test_ctrl_c_while_a_grammar_is_read_does_not_affect_the_next(tiny_llama: Path) -> None:
    with BatchInferenceEngine(tiny_llama, **SETTINGS) as engine:
        prepare(engine, guided_regex="ready")
        timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            prepare(engine, json_schema={"type": "integer", "multipleOf": 199_999})
        assert one(engine, greedy(9, guided_choice=["interrupted"])).text == "interrupted"
        assert one(engine, greedy(9, guided_choice=["and again"])).text == "and again"


# --- cells run out, steps are interrupted ----------------------------------------------------------------------------


@pytest.mark.parametrize("swap_space", [0, 1024])
def test_preempted_constrained_texts_of_a_real_model_are_those_of_ample_cells(
    tiny_llama: Path, swap_space: int
) -> None:
    params = [greedy(48, guided_regex="([a-z ]{8}, and so on; ){9}", stop=("z, and",)) for _ in range(8)]
    prompts = ["the cat " * (i + 1) for i in range(8)]
    texts = []
    for n_ctx in (4096, 256):
        its: dict[str, Any] = {**SETTINGS, "n_ctx": n_ctx, "kv_layout": "unified", "swap_space": swap_space}
        with BatchInferenceEngine(tiny_llama, **its) as engine:
            texts.append([result.text for result in engine.generate(prompts, params)])
            stats = engine.stats()
    assert texts[0] == texts[1]
    assert stats.swaps + stats.recomputes > 0


# --- where a text ends -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [{"ignore_eos": True}, {"min_tokens": 30}, {"ignore_eos": True, "min_tokens": 30}])
def test_a_grammar_ends_its_text_regardless_of_end_settings(engine: BatchInferenceEngine, fields: Fields) -> None:
    for regex in ("[a-c]", "[a-c]{3}", "abc", "(ab|abc)"):
        result = one(engine, greedy(40, guided_regex=regex, **fields))
        assert result.finish_reason is FinishReason.STOP
        assert re.fullmatch(regex, result.text)


def test_the_empty_text_may_be_all_that_matches(engine: BatchInferenceEngine) -> None:
    result = one(engine, greedy(5, guided_regex=""))
    assert (result.text, result.tokens, result.finish_reason) == ("", [], FinishReason.STOP)


# --- special tokens --------------------------------------------------------------------------------------------------


def specials(engine: BatchInferenceEngine) -> list[int]:
    vocab = engine.core.runtime.vocab
    return [token for token in range(vocab.n_tokens) if vocab.piece(token, special=True) and not vocab.piece(token)]


def test_special_tokens_never_come_out_of_a_grammar(engine: BatchInferenceEngine) -> None:
    special = specials(engine)
    assert len(special) >= 4
    params = [
        SamplingParams(seed=i, temperature=1.5, max_tokens=40, logit_bias=dict.fromkeys(special, 100.0), **fields)
        for i, fields in enumerate([{"guided_regex": "(?s).{40,}"}, *(its for its, _ in KINDS.values())] * 2)
    ]
    for result in engine.generate([PROMPT] * len(params), params):
        assert not set(special) & set(result.tokens)


@pytest.mark.parametrize("fields", [{}, {"logprobs": 0}], ids=["forced", "unforced"])
@pytest.mark.parametrize("kind", ["guided_choice", "json_schema", "grammar"])
def test_a_text_that_looks_like_a_special_token_is_spelled_in_ordinary_ones(
    engine: BatchInferenceEngine, kind: str, fields: Fields
) -> None:
    text = "say <|im_end|> </s> now"
    its: object = {"guided_choice": [text], "json_schema": {"const": text}, "grammar": f'root ::= "{text}"'}[kind]
    result = one(engine, greedy(60, **{kind: its}, **fields))
    assert (result.text.strip('"'), result.finish_reason) == (text, FinishReason.STOP)
    assert not set(specials(engine)) & set(result.tokens)


# --- compiling -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [{"json_schema": {"enum": [f"{i} of many" for i in range(6000)]}}, {"guided_regex": "a(b" * 3000}],
    ids=["good", "bad"],
)
def test_a_grammar_is_compiled_once(
    engine: BatchInferenceEngine, monkeypatch: pytest.MonkeyPatch, fields: Fields
) -> None:
    compiled = []
    compile_grammar = structured_output.GrammarCompiler._compile

    def counted(
        compiler: structured_output.GrammarCompiler, field: str, text: str, checker: grammar_check.GrammarChecker
    ) -> object:
        compiled.append(text)
        return compile_grammar(compiler, field, text, checker)

    monkeypatch.setattr(structured_output.GrammarCompiler, "_compile", counted)
    for _ in range(4):
        with contextlib.suppress(InvalidRequest):
            prepare(engine, **fields)
    assert len(compiled) == 1


def test_sequences_of_one_compiled_grammar_do_not_move_each_other(engine: BatchInferenceEngine) -> None:
    first, second = (prepare(engine, guided_regex="[ab][cd]").constraint for _ in range(2))
    assert first
    assert second
    for constraint in (first, second):
        assert not constraint.is_done
        for token in engine.core.runtime.vocab.tokenize("ac", add_special=False).tolist():
            constraint.accept(token)
        assert constraint.is_done


def test_any_thread_may_prepare_while_the_engine_runs(engine: BatchInferenceEngine) -> None:
    fields = [its for its, _ in KINDS.values()] + [{"guided_regex": f"[a-z]{{{n}}}"} for n in range(1, 25)]
    beside = greedy(80, guided_regex="[a-z ]{300}")
    alone = one(engine, beside).text
    name = engine.add_request(PROMPT, beside)
    with ThreadPoolExecutor(8) as threads:
        sequences = threads.map(lambda its: prepare(engine, **its), fields * 3)
        events = drain(engine)
        assert all(sequence.constraint for sequence in sequences)
    assert text_of(events, name) == alone


# --- on models -------------------------------------------------------------------------------------------------------


def test_a_marker_that_is_a_control_token_is_enforced_as_that_and_seen(tiny_llama: Path) -> None:
    with BatchInferenceEngine(tiny_llama, n_ctx=512, n_parallel=2, n_threads=1) as engine:
        name = "<|im_start|>"
        token = IM_START
        grammar = f'start: "a" <[{token}]> "b" <[{token}]> "c"'
        for seen, text in (((name, "no token"), f"a{name}b{name}c"), ((), "abc")):
            (result,) = engine.generate(["x"], SamplingParams(grammar=grammar, visible_tokens=seen, max_tokens=20))
            assert result.text == text
        with pytest.raises(InvalidRequest, match="99999"):
            engine.generate(["x"], SamplingParams(grammar="start: <[99999]>"))
        negated = SamplingParams(grammar=f"start: <[^0-{token - 1},{token + 1}-511]>", max_tokens=20)
        (result,) = engine.generate(["x"], negated)
        assert result.tokens == [token]
