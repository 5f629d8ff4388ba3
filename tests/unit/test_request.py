"""Refusals and their messages; generate and stream."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest

from cppbatch import (
    BatchInferenceEngine,
    EngineConfig,
    FinishReason,
    GenerationEvent,
    GenerationRequest,
    InvalidRequest,
    SamplingParams,
    generate_batch,
)
from cppbatch.config import SETTINGS
from cppbatch.engine.params import GRAMMARS, SAMPLERS, format_value
from cppbatch.errors import ConfigError, EngineClosed
from tests.support.fakes import EOG, N_VOCAB, context_of, drain, fake_engine, greedy, reference, result_of, tokens_of

ENDLESS = greedy(9, ignore_eos=True)
NAN, INF = float("nan"), float("inf")
BOUNDS = {
    "temperature": (0, 100),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "dynatemp_range": (0, 100),
    "dynatemp_exponent": (0.01, 100),
    "typical_p": (0, 1),
    "top_n_sigma": (-1, 1000),
    "xtc_probability": (0, 1),
    "xtc_threshold": (0, 1),
    "mirostat_tau": (0, 1000),
    "mirostat_eta": (0, 10),
    "adaptive_target": (-1, 1),
    "adaptive_decay": (0, 0.99),
    "repetition_penalty": (0.01, 100),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "dry_multiplier": (0, 1000),
    "dry_base": (0, 1000),
    "max_tokens": (1, 2**31 - 1),
    "top_k": (0, 2**31 - 1),
    "penalty_last_n": (-1, 2**31 - 1),
    "min_tokens": (0, 2**31 - 1),
    "mirostat": (0, 2),
    "dry_allowed_length": (0, 2**31 - 1),
    "dry_penalty_last_n": (-1, 2**31 - 1),
    "logprobs": (0, 20),
    "seed": (-(2**63), 2**64 - 1),
}
WHOLE = (
    "max_tokens", "top_k", "mirostat", "penalty_last_n", "dry_allowed_length", "dry_penalty_last_n", "min_tokens",
    "logprobs", "seed",
)  # fmt: skip
OPTIONAL = ("max_tokens", "logprobs", "seed")


def refusal(field: str, value: object) -> str:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert caught.value.field == field
    return str(caught.value)


def answer_of(events: list[GenerationEvent]) -> tuple[list[int], str, FinishReason | None]:
    tokens = [token for event in events for token in event.tokens]
    return tokens, "".join(event.text for event in events), events[-1].finish_reason


# --- SamplingParams -------------------------------------------------------------------------------------------------


def test_every_number_has_bounds() -> None:
    kinds = get_type_hints(SamplingParams)
    assert {name for name, kind in kinds.items() if kind in (int, float, int | None, float | None)} == set(BOUNDS)


@pytest.mark.parametrize("field", BOUNDS)
def test_both_bounds_of_a_number_are_allowed(field: str) -> None:
    for bound in BOUNDS[field]:
        assert getattr(SamplingParams(**{field: bound}), field) == bound  # type: ignore[arg-type]


@pytest.mark.parametrize("field", BOUNDS)
def test_a_number_out_of_bounds_is_refused_with_the_value_and_both_bounds(field: str) -> None:
    low, high = BOUNDS[field]
    beyond = 1 if field in WHOLE else 0.001
    for value in (low - beyond, high + beyond):
        assert refusal(field, value) == f"{field}: is {value}; it must be from {low} to {high}"


@pytest.mark.parametrize("field", [field for field in BOUNDS if field not in WHOLE])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_a_number_that_is_not_finite_is_refused(field: str, value: float) -> None:
    assert f"is {value}; it must be from" in refusal(field, value)


@pytest.mark.parametrize("field", BOUNDS)
@pytest.mark.parametrize("value", ["1", [1], True, False, 1j])
def test_a_value_that_is_not_a_number_is_refused_with_the_value_and_the_expected_type(
    field: str, value: object
) -> None:
    kind = "a whole number" if field in WHOLE else "a number"
    assert refusal(field, value) == f"{field}: is {value!r}; it must be {kind}"


@pytest.mark.parametrize("field", WHOLE)
@pytest.mark.parametrize("value", [1.0, 1.5, NAN, INF])
def test_a_fraction_is_not_a_whole_number(field: str, value: float) -> None:
    assert refusal(field, value) == f"{field}: is {value!r}; it must be a whole number"


@pytest.mark.parametrize("field", [field for field in BOUNDS if field not in OPTIONAL])
def test_none_is_refused_for_a_field_without_a_default(field: str) -> None:
    assert "is None; it must be" in refusal(field, None)


@pytest.mark.parametrize("value", [None, 5, b"x", ["a", 1], [None], [["a"]]])
def test_stop_is_a_string_or_strings(value: object) -> None:
    assert refusal("stop", value) == f"stop: is {value!r}; it must be a string or a list of strings"


@pytest.mark.parametrize("value", ["", ["a", ""]])
def test_an_empty_stop_string_is_refused(value: object) -> None:
    assert "empty string" in refusal("stop", value)


def test_one_stop_string_may_be_given_without_a_list() -> None:
    assert SamplingParams(stop="ab").stop == ("ab",)
    assert SamplingParams(stop=["ab", "c"]).stop == ("ab", "c")


@pytest.mark.parametrize("field", ["stop_token_ids", "suppress_tokens"])
@pytest.mark.parametrize("value", [None, "12", ["1"], [1.0], [None], [True]])
def test_token_ids_are_whole_numbers(field: str, value: object) -> None:
    assert refusal(field, value) == f"{field}: is {value!r}; it must be a list of token ids"


def test_min_tokens_above_max_tokens_is_refused_with_both() -> None:
    with pytest.raises(InvalidRequest, match=r"min_tokens: is 6; it must not be more than max_tokens, which is 5"):
        SamplingParams(min_tokens=6, max_tokens=5)


@pytest.mark.parametrize("value", [None, 5, b"x", ["top_k", 1], [None]])
def test_samplers_are_names(value: object) -> None:
    assert refusal("samplers", value) == f"samplers: is {value!r}; it must be a list of names"


def test_an_unknown_sampler_is_refused_with_its_place_and_the_valid_names() -> None:
    with pytest.raises(
        InvalidRequest, match=r"^samplers\[1\]: is 'top_q'; it must be one of penalties, dry, .*, temperature$"
    ):
        SamplingParams(samplers=("top_k", "top_q"))


def test_a_sampler_is_named_once() -> None:
    with pytest.raises(InvalidRequest, match=r"^samplers\[2\]: is 'top_k', which is already in the list$"):
        SamplingParams(samplers=("top_k", "top_p", "top_k"))


def test_samplers_may_be_some_of_them_in_any_order_or_none() -> None:
    assert SamplingParams(samplers=["temperature", "top_k"]).samplers == ("temperature", "top_k")
    assert SamplingParams(samplers=()).samplers == ()
    assert SamplingParams(samplers=tuple(reversed(SAMPLERS))).samplers[0] == "temperature"


def test_without_temperature_among_the_samplers_nothing_is_greedy() -> None:
    assert SamplingParams(temperature=0).is_greedy
    assert not SamplingParams(temperature=0, samplers=("top_k",)).is_greedy


def test_penalties_left_out_of_the_samplers_are_off() -> None:
    assert SamplingParams(repetition_penalty=2).has_penalties
    assert not SamplingParams(repetition_penalty=2, samplers=("top_k", "temperature")).has_penalties
    assert not SamplingParams(repetition_penalty=2, penalty_last_n=0).has_penalties


def test_two_ways_to_draw_are_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"^adaptive_target: cannot be combined with mirostat"):
        SamplingParams(mirostat=1, adaptive_target=0.5)
    assert SamplingParams(mirostat=1, adaptive_target=-0.5).mirostat == 1


@pytest.mark.parametrize("value", [None, 5, ["a", 1], [None]])
def test_breakers_are_strings(value: object) -> None:
    field = "dry_sequence_breakers"
    assert refusal(field, value) == f"{field}: is {value!r}; it must be a list of strings"


def test_of_a_breaker_40_letters_count_and_of_an_empty_one_nothing() -> None:
    assert SamplingParams(dry_sequence_breakers=("x" * 50, "", "\n")).dry_sequence_breakers == ("x" * 40, "\n")


@pytest.mark.parametrize("value", [None, 5, "1", [(1, 2.0)], [1, 2]])
def test_biases_are_an_object(value: object) -> None:
    message = f"logit_bias: is {value!r}; it must be an object that maps token ids (or strings) to biases"
    assert refusal("logit_bias", value) == message


@pytest.mark.parametrize("key", [None, 1.0, True, (1,), b"a", ""])
def test_the_keys_of_biases_are_token_ids_or_strings(key: object) -> None:
    assert refusal("logit_bias", {key: 1.0}) == f"logit_bias: has the key {key!r}; keys are token ids or strings"


@pytest.mark.parametrize(
    "bias", [None, "1", True, [1], NAN, INF, -INF, 100.001, -100.001, pytest.param(10**400, id="10**400")]
)
def test_a_bias_is_a_number_from_minus_100_to_100(bias: object) -> None:
    message = f"logit_bias: is {format_value(bias)} for 'a'; it must be from -100 to 100"
    assert refusal("logit_bias", {3: 1.0, "a": bias}) == message


@pytest.mark.parametrize("field", ["stop_token_ids", "suppress_tokens"])
@pytest.mark.parametrize("token", [-1, 2**31, 2**63, 2**64, -(2**63) - 1, pytest.param(10**5000, id="10**5000")])
def test_ids_of_tokens_are_int32(field: str, token: int) -> None:
    with pytest.raises(InvalidRequest, match=rf"{field}\[1\]: is .*; token ids are 0 to 2147483647") as caught:
        SamplingParams(**{field: [5, token]})  # type: ignore[arg-type]
    assert len(str(caught.value)) < 120
    with pytest.raises(InvalidRequest, match=r"prompt\[0\]: is .*; token ids are 0 to 2147483647"):
        GenerationRequest(id="a", prompt=[token])
    with pytest.raises(InvalidRequest, match=r"logit_bias: contains the token id .*; token ids are 0 to 2147483647"):
        SamplingParams(logit_bias={token: 1.0})


def test_ids_of_numpy_become_pythons() -> None:
    request = GenerationRequest(id="a", prompt=[np.int64(5), 6], params=SamplingParams(stop_token_ids=[np.int32(7)]))
    assert [type(token) for token in [*request.prompt, *request.params.stop_token_ids]] == [int] * 3  # type: ignore[misc]


def test_the_number_of_biases_is_limited() -> None:
    assert len(SamplingParams(logit_bias=dict.fromkeys(range(8192), 1.0)).logit_bias) == 8192
    assert "has 8,193 entries" in refusal("logit_bias", dict.fromkeys(range(8193), 1.0))


def test_both_bounds_of_a_bias_and_both_kinds_of_keys_are_allowed() -> None:
    biases = {3: 100, "3": -100.0, " word": 0.5}
    assert SamplingParams(logit_bias=biases).logit_bias == biases  # type: ignore[arg-type]


@pytest.mark.parametrize("field", ["ignore_eos", "speculate", "include_stop", "skip_special_tokens", "echo"])
@pytest.mark.parametrize("value", [None, 0, 1, "yes", []])
def test_a_switch_is_true_or_false(field: str, value: object) -> None:
    assert refusal(field, value) == f"{field}: is {value!r}; it must be true or false"


def test_visible_tokens_are_a_few_strings() -> None:
    assert SamplingParams(visible_tokens="[ARGS]").visible_tokens == ("[ARGS]",)
    assert refusal("visible_tokens", [5]) == "visible_tokens: is [5]; it must be a list of strings"
    assert refusal("visible_tokens", ["x"] * 65) == "visible_tokens: has 65 entries; the limit is 64"


def test_max_tokens_may_be_0_only_if_the_prompt_is_echoed() -> None:
    assert SamplingParams(max_tokens=0, echo=True).max_tokens == 0
    assert refusal("max_tokens", 0) == f"max_tokens: is 0; it must be from 1 to {2**31 - 1}"
    with pytest.raises(InvalidRequest, match=f"^max_tokens: is -2; it must be from 0 to {2**31 - 1}$"):
        SamplingParams(max_tokens=-2, echo=True)
    with pytest.raises(InvalidRequest, match="min_tokens: is 1; it must not be more than max_tokens, which is 0"):
        SamplingParams(max_tokens=0, min_tokens=1, echo=True)


def test_a_prompt_is_scored_only_when_it_is_echoed_with_log_probabilities() -> None:
    both, echo, logprobs = SamplingParams(echo=True, logprobs=0), SamplingParams(echo=True), SamplingParams(logprobs=0)
    assert [params.scores_prompt for params in (both, echo, logprobs)] == [True, False, False]


@pytest.mark.parametrize("value", [5, "text", [print], {"f": print}])
def test_a_logits_processor_must_be_one(value: object) -> None:
    message = f"logits_processor: is {value!r}; it must be a function f(tokens, logits)"
    assert refusal("logits_processor", value) == message


def test_a_logits_processor_is_a_function_or_has_process_rows() -> None:
    class OnlyRows:
        def process_rows(self, tokens: object, rows: object) -> None: ...

    for processor in (print, lambda tokens, row: row, OnlyRows()):
        assert SamplingParams(logits_processor=processor).logits_processor is processor


# --- constraints on the text ----------------------------------------------------------------------------------------

GIVEN: dict[str, Any] = {
    "json_schema": {"type": "object"}, "guided_regex": "a+", "guided_choice": ("a", "b"), "grammar": 'root ::= "a"',
}  # fmt: skip


def test_every_kind_of_grammar_is_accepted() -> None:
    assert tuple(GIVEN) == GRAMMARS
    assert not SamplingParams().is_constrained
    assert all(SamplingParams(**{field: value}).is_constrained for field, value in GIVEN.items())


@pytest.mark.parametrize("pair", list(itertools.combinations(GIVEN, 2)), ids="+".join)
def test_two_kinds_of_grammar_are_refused(pair: tuple[str, str]) -> None:
    first, second = pair
    message = f"{second}: cannot be combined with {first}: give only one grammar"
    with pytest.raises(InvalidRequest, match="^" + re.escape(message) + "$"):
        SamplingParams(**{field: GIVEN[field] for field in pair})


@pytest.mark.parametrize("field", ["guided_regex", "grammar"])
@pytest.mark.parametrize("value", [5, True, ["a"], b"a", {}])
def test_a_regular_expression_and_a_grammar_are_strings(field: str, value: object) -> None:
    assert refusal(field, value) == f"{field}: is {value!r}; it must be a string"


@pytest.mark.parametrize("value", [5, True, b"x", ["a", 1], [None], [["a"]]])
def test_choices_are_strings(value: object) -> None:
    assert refusal("guided_choice", value) == f"guided_choice: is {value!r}; it must be a list of strings"


@pytest.mark.parametrize("value", [[], (), "", ["a", ""]])
def test_choices_are_some_and_none_is_empty(value: object) -> None:
    assert refusal("guided_choice", value) == "guided_choice: must contain at least one string, and no empty strings"


def test_one_choice_may_be_given_without_a_list() -> None:
    assert SamplingParams(guided_choice="yes").guided_choice == ("yes",)


@pytest.mark.parametrize("schema", [{"type": "object", "title": "é"}, {}, True, False])
def test_a_schema_is_an_object_or_its_json_text(schema: object) -> None:
    kept = SamplingParams(json_schema=schema).json_schema  # type: ignore[arg-type]
    assert isinstance(kept, str)
    assert json.loads(kept) == schema
    assert SamplingParams(json_schema=json.dumps(schema)).json_schema == kept


def test_a_schema_keeps_the_order_of_its_keys() -> None:
    kept = SamplingParams(json_schema={"properties": {"z": {}, "a": {}, "m": {}}}).json_schema
    assert kept == '{"properties": {"z": {}, "a": {}, "m": {}}}'


@pytest.mark.parametrize("value", [5, 1.5, [], [{}], "5", "[]", '"a"', "null"])
def test_a_schema_of_another_type_is_refused(value: object) -> None:
    parsed = json.loads(value) if isinstance(value, str) else value
    assert refusal("json_schema", value) == f"json_schema: is {parsed!r}; a schema must be an object, true or false"


def circular() -> dict[str, object]:
    schema: dict[str, object] = {}
    schema["items"] = schema
    return schema


@pytest.mark.parametrize(
    "value",
    ["", "{", "{'a': 1}", {"a": {1, 2}}, {(1, 2): 3}, {"minimum": NAN}, '{"a": NaN}', b"{}", circular()],
    ids=str,
)
def test_a_schema_that_is_not_json_is_refused(value: object) -> None:
    assert refusal("json_schema", value).startswith(
        "json_schema: is b'{}'; a schema" if isinstance(value, bytes) else "json_schema: is not valid JSON: "
    )


def test_a_schema_nested_too_deeply_is_refused() -> None:
    for depth in (129, 10_000, 100_000):  # how deep json reads and writes depends on Python's version
        schema: dict[str, object] = {}
        for _ in range(depth - 1):
            schema = {"items": schema}
        assert refusal("json_schema", schema).startswith("json_schema: is nested too deeply")
    text = '{"items": ' * 10_000 + "{}" + "}" * 10_000
    assert refusal("json_schema", text).startswith("json_schema: is nested too deeply")


def test_a_schema_of_128_levels_is_accepted() -> None:
    text = '{"items": ' * 127 + "{}" + "}" * 127
    assert SamplingParams(json_schema=text).json_schema == text


def test_the_defaults_are_those_of_llama_cpp() -> None:
    params = SamplingParams()
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.8, 40, 0.95, 0.05)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.0, 0.0, 0.0)
    assert (params.penalty_last_n, params.stop, params.max_tokens, params.seed) == (64, (), None, None)
    assert (params.dynatemp_range, params.dynatemp_exponent, params.typical_p, params.top_n_sigma) == (0, 1, 1, -1)
    assert (params.xtc_probability, params.xtc_threshold) == (0.0, 0.1)
    assert (params.mirostat, params.mirostat_tau, params.mirostat_eta) == (0, 5.0, 0.1)
    assert (params.adaptive_target, params.adaptive_decay) == (-1.0, 0.9)
    assert (params.dry_multiplier, params.dry_base, params.dry_allowed_length) == (0.0, 1.75, 2)
    assert params.dry_sequence_breakers == ("\n", ":", '"', "*")
    assert params.samplers == SAMPLERS
    assert not params.is_greedy
    assert not params.has_penalties


# --- what an engine refuses -----------------------------------------------------------------------------------------

LIMIT = 64
REFUSED: list[tuple[Any, SamplingParams, str]] = [
    ("", greedy(1), "prompt: is empty"),
    ([], greedy(1), "prompt: is empty"),
    (" ", greedy(1), "prompt: "),
    ([1, N_VOCAB], greedy(1), f"prompt[1]: is {N_VOCAB}; token ids are 0 to {N_VOCAB - 1}"),
    ([-1], greedy(1), "prompt[0]: is -1; token ids are"),
    ([1, 2.0], greedy(1), "prompt[1]: is 2.0; token ids are"),
    (["a"], greedy(1), "prompt[0]: is 'a'; token ids are"),
    ([1] * LIMIT, greedy(), f"prompt: has {LIMIT} tokens, but this context holds only {LIMIT}"),
    ([1] * (LIMIT + 9), greedy(), f"prompt: has {LIMIT + 9} tokens, but this context holds only {LIMIT}"),
    (
        [1] * 10,
        greedy(55),
        f"max_tokens: is 55: with a prompt of 10 tokens, that is 65 in total, but this context holds only {LIMIT}",
    ),
    ([1], greedy(1, stop_token_ids=(3, N_VOCAB)), f"stop_token_ids[1]: is {N_VOCAB}; token ids are"),
    ([1], greedy(1, suppress_tokens=(3, N_VOCAB)), f"suppress_tokens[1]: is {N_VOCAB}; token ids are"),
    (
        [1],
        greedy(1, logit_bias={N_VOCAB: 1.0}),
        f"logit_bias: contains the token id {N_VOCAB}; token ids are 0 to {N_VOCAB - 1}",
    ),
    ([1], greedy(1, logit_bias={f"{N_VOCAB}": 1.0}), f"logit_bias: contains the token id {N_VOCAB}; token ids are"),
    ([1], greedy(1, guided_regex="("), "guided_regex: "),
    ([1], greedy(1, grammar="nonsense"), "grammar: "),
    ([1], greedy(1, json_schema={"type": 5}), "json_schema: #/type: type must be a string or array of strings"),
    ([1], greedy(1, json_schema={"$ref": "#"}), "json_schema: no finite JSON satisfies this schema"),
    ([1] * LIMIT, greedy(0, echo=True), f"prompt: has {LIMIT} tokens, but this context holds only {LIMIT}"),
    (5, greedy(1), "prompt: "),
    (None, greedy(1), "prompt: "),
]
each_refused = pytest.mark.parametrize(("prompt", "params", "message"), REFUSED, ids=[row[2][:32] for row in REFUSED])


@each_refused
def test_a_request_that_cannot_run_is_refused_and_leaves_nothing(
    prompt: Any, params: SamplingParams, message: str
) -> None:
    engine = fake_engine(n_ctx=LIMIT)
    with pytest.raises(InvalidRequest, match="^" + re.escape(message)):
        engine.add_request(prompt, params)
    assert not engine.has_work


@each_refused
def test_generate_names_the_prompt_at_fault_before_anything_runs(
    prompt: Any, params: SamplingParams, message: str
) -> None:
    engine = fake_engine(n_ctx=LIMIT)
    with pytest.raises(InvalidRequest, match="^" + re.escape(f"prompts[1]: {message}")):
        engine.generate([[1], prompt], [greedy(1), params])
    assert not engine.has_work
    assert context_of(engine).steps == []


def test_a_bare_string_of_prompts_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"prompts: is a single string; .*\[prompt\]"):
        fake_engine().generate("abc")


def test_as_many_params_as_prompts_or_one() -> None:
    engine = fake_engine()
    with pytest.raises(InvalidRequest, match="params: has 3 entries for 2 prompts"):
        engine.generate(["a", "b"], [greedy(1)] * 3)
    results = engine.generate([[1], [2]], [ENDLESS, greedy(1, ignore_eos=True)])
    assert [len(result.tokens) for result in results] == [9, 1]


def test_an_id_can_be_used_again_only_after_its_request_has_ended() -> None:
    engine = fake_engine()
    engine.add_request([1], greedy(1), request_id="mine")
    with pytest.raises(InvalidRequest, match="id: 'mine' is already the id of a running request"):
        engine.add_request([2], greedy(1), request_id="mine")
    engine.step()
    assert engine.add_request([2], greedy(1), request_id="mine") == "mine"


def test_a_given_request_id_does_not_collide_with_generated_ones() -> None:
    engine = fake_engine()
    engine.add_request([1], greedy(1), request_id="request-2")
    results = engine.generate([[2], [3]], greedy(1))
    assert [result_of(result) for result in results] == [reference([2], greedy(1)), reference([3], greedy(1))]


@pytest.mark.parametrize(("n_ctx", "n_parallel", "expected"), [(64, 4, 54), (512, 4, 502)])
def test_without_max_tokens_an_answer_may_fill_the_context(n_ctx: int, n_parallel: int, expected: int) -> None:
    engine = fake_engine(n_ctx=n_ctx, n_parallel=n_parallel)
    (result,) = engine.generate([[1] * 10], greedy(ignore_eos=True))
    assert (len(result.tokens), result.finish_reason) == (expected, FinishReason.LENGTH)


def test_a_closed_engine_ends_running_requests_and_accepts_no_new_ones() -> None:
    engine = fake_engine()
    engine.add_request([1], ENDLESS)
    engine.step()
    engine.close()
    assert [event.finish_reason for event in engine.step()] == [FinishReason.CANCELLED]
    assert context_of(engine).is_closed
    with pytest.raises(EngineClosed):
        engine.add_request([1], greedy(1))


# --- generate and stream --------------------------------------------------------------------------------------------


def test_generate_returns_the_results_in_the_prompts_order() -> None:
    prompts = [[i, 2 * i] for i in range(20)]
    params = [greedy(1 + i % 7) for i in range(20)]
    results = fake_engine().generate(prompts, params)
    assert [result_of(r) for r in results] == [reference(p, its) for p, its in zip(prompts, params, strict=True)]
    assert fake_engine().generate([]) == []


def test_a_token_that_ends_the_text_is_not_part_of_it() -> None:
    first = reference([1, 2], greedy(1, ignore_eos=True))[0][0]
    (result,) = fake_engine().generate([[1, 2]], greedy(9, stop_token_ids=(first,)))
    assert result_of(result) == ([], "", FinishReason.STOP)
    (result,) = fake_engine().generate([[1, 2]], greedy(9, stop_token_ids=(first,), min_tokens=3))
    assert len(result.tokens) >= 3
    assert not {first, *EOG} & set(result.tokens[:3])


def test_an_interrupted_generate_cancels_the_remaining_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = fake_engine()

    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(context_of(engine), "decode", interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.generate([[1], [2]], ENDLESS)
    assert (engine.has_work, engine.core.kv.n_free_ids) == (False, 4)


@pytest.mark.parametrize("n_read", [0, 1, 3])
def test_closing_a_stream_cancels_its_request(n_read: int) -> None:
    engine = fake_engine()
    stream: Any = engine.stream([1, 2], ENDLESS)
    for _ in range(n_read):
        next(stream)
    stream.close()
    assert (engine.has_work, context_of(engine).n_used, engine.core.kv.n_free_ids) == (False, 0, 4)


def test_two_streams_read_in_turns_both_get_all_their_events() -> None:
    engine = fake_engine()
    streams = {i: engine.stream([i], greedy(4 * i, ignore_eos=True)) for i in (1, 2)}
    events: dict[int, list[GenerationEvent]] = {1: [], 2: []}
    while streams:
        for i, stream in list(streams.items()):
            event = next(stream, None)
            if event is None:
                del streams[i]
            else:
                events[i].append(event)
    for i, its in events.items():
        assert answer_of(its) == reference([i], greedy(4 * i, ignore_eos=True))


def read_a_stream(engine: BatchInferenceEngine) -> None:
    list(engine.stream([3], ENDLESS))


def close_a_stream(engine: BatchInferenceEngine) -> None:
    stream: Any = engine.stream([3], ENDLESS)
    next(stream)
    stream.close()


def generate(engine: BatchInferenceEngine) -> None:
    engine.generate([[3], [4]], ENDLESS)


@pytest.mark.parametrize("meanwhile", [read_a_stream, close_a_stream, generate])
def test_events_of_other_requests_come_out_of_step(meanwhile: Callable[[BatchInferenceEngine], None]) -> None:
    engine = fake_engine()
    engine.add_request([1], ENDLESS)
    meanwhile(engine)
    assert answer_of(drain(engine)) == reference([1], ENDLESS)


def test_settings_beside_a_ready_config_are_used() -> None:
    from cppbatch.config import EngineConfig
    from cppbatch.engine_settings import engine_config

    assert engine_config(EngineConfig(model_path="x", n_ctx=512), {"n_ctx": 1024}).n_ctx == 1024


@pytest.mark.parametrize("params", [{"max_tokens": 4, "temperature": 0}, greedy(4)])
def test_params_may_be_a_dict(params: Any) -> None:
    engine = fake_engine()
    expected = reference([5, 6], greedy(4))[0]
    assert engine.generate([[5, 6]], params)[0].tokens == expected
    assert engine.generate([[5, 6]], [params])[0].tokens == expected
    assert [each.completion.tokens for each in engine.map([[5, 6]], params)] == [expected]


def test_params_may_be_a_number_of_tokens() -> None:
    assert len(fake_engine().generate([[5, 6]], 4)[0].tokens) <= 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((5,), "prompts: is 5; give a list of strings"),
        ((["x"], {"max_token": 4}), "'max_token', which is not a field of SamplingParams; did you mean max_tokens?"),
        ((["x"], 1.5), "params: is 1.5; give SamplingParams, a dict of its fields, or a number of tokens"),
        ((["x"], "abc"), "params: is 'abc'; give SamplingParams"),
    ],
)
def test_other_arguments_of_generate_are_refused_with_what_to_write(arguments: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(message)):
        fake_engine().generate(*arguments)


def test_other_arguments_of_map_and_forward_batch_are_refused_with_what_to_write() -> None:
    given: Any = 5
    with pytest.raises(InvalidRequest, match="prompts: is 5; give an iterable of strings"):
        fake_engine().map(given)
    for given in (5, [5], ["abc"], "abc"):
        with pytest.raises(InvalidRequest, match=r"token_lists: is .*; give lists of token ids, like \[engine\.tokens"):
            fake_engine().forward_batch(given)


@pytest.mark.parametrize("name", ["n_ctx", "n_parallel", "n_threads", "swap_space", "target_itl_ms", "draft_max"])
def test_a_setting_that_is_not_a_number_is_refused_with_its_flag(name: str) -> None:
    wrong: Any = {name: "12"}
    with pytest.raises(ConfigError, match=rf"^{name} \(-.*\) is '12'; it must be "):
        EngineConfig("x", **wrong)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "x"}, "device (--devices) is 'x'; it must be a whole number, or None"),
        ({"tensor_split": 1}, "tensor_split (-ts) is 1; it must be a list of numbers, like [3, 1]"),
        ({"tensor_split": ["a"]}, "tensor_split (-ts) is ['a']; it must be a list of numbers"),
        ({"rpc": [1]}, "rpc (--rpc) is [1]; it must be a list of strings"),
        ({"n_parallel": 5.5}, "n_parallel (-np) is 5.5; it must be a whole number, from 1 to 256"),
        ({"deterministic": "no"}, "deterministic (--deterministic) is 'no'; it must be True or False"),
        ({"prefix_cache_disk": 5}, "prefix_cache_disk (--prefix-cache-disk) is 5; it must be a string"),
        ({"kv_layout": None}, "kv_layout (--kv-layout) is None; it must be one of auto, unified, per-sequence"),
        ({"step_ms": 5}, "step_ms is 5; it must be a list of (rows, ms) pairs"),
        ({"lora": 5}, "lora (--lora) is 5; it must be a list of (file, scale) pairs"),
    ],
)
def test_a_setting_of_another_type_is_refused_with_the_expected_type(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        EngineConfig("x", **settings)


def test_every_setting_refuses_another_type_with_its_name() -> None:
    for name in SETTINGS:
        wrong: Any = {name: object()}
        with pytest.raises(ConfigError, match=f"^{name} .*it must be "):
            EngineConfig("x", **wrong)


def test_paths_and_lists_are_settings_too() -> None:
    given: Any = {"draft_model": Path("a.gguf"), "mmproj": None, "tensor_split": [3, 1], "lora": [[Path("b.gguf"), 1]]}
    config = EngineConfig("x", **given)
    assert (config.draft_model, config.mmproj, config.tensor_split) == ("a.gguf", "", (3.0, 1.0))
    assert config.lora == (("b.gguf", 1.0),)


def test_generate_batch_takes_the_positional_form() -> None:
    engine = fake_engine()
    given = generate_batch(engine, [[5, 6]], 4, 0.7, 0.9, 42)[0]
    wanted = engine.generate([[5, 6]], SamplingParams(max_tokens=4, temperature=0.7, top_p=0.9, seed=42))[0]
    assert (given.tokens, given.seed) == (wanted.tokens, 42)


def test_one_rpc_worker_may_be_given_without_a_list() -> None:
    assert EngineConfig("x", rpc="127.0.0.1:5").rpc == ("127.0.0.1:5",)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"rpc \(--rpc\) is 5; it must be a list of strings"):
        EngineConfig("x", rpc=5)  # type: ignore[arg-type]


def test_update_request_appends_given_tokens_and_the_text_continues_after_them() -> None:
    engine = fake_engine()
    other = engine.add_request([9, 9, 3], greedy(12))
    name = engine.add_request([5, 6], greedy(12, ignore_eos=True))
    events: list[GenerationEvent] = []
    while sum(len(event.tokens) for event in events if event.request_id == name) < 2:
        events += engine.step()
    before = tokens_of(events, name)
    assert engine.update_request(name, [7, 8])
    events += drain(engine)
    expected = [*before, 7, 8]
    expected += reference([5, 6, *expected], greedy(12 - len(expected), ignore_eos=True))[0]
    assert tokens_of(events, name) == expected
    assert tokens_of(events, other) == reference([9, 9, 3], greedy(12))[0]
    engine.core.kv.check()


def test_update_request_refuses_what_does_not_fit_and_ends_a_full_text() -> None:
    engine = fake_engine()
    name = engine.add_request([5, 6], greedy(4, ignore_eos=True))
    with pytest.raises(InvalidRequest, match="tokens: has 5 ids, but there is room for only 4 more"):
        engine.update_request(name, [7] * 5)
    with pytest.raises(InvalidRequest, match=str(N_VOCAB)):
        engine.update_request(name, [N_VOCAB])
    wrong: Any
    for wrong in ("abc", 5):
        with pytest.raises(InvalidRequest, match=f"tokens: is {wrong!r}; give a list of token ids"):
            engine.update_request(name, wrong)
    assert engine.update_request(name, [7] * 4)
    events = drain(engine)
    assert (tokens_of(events, name), events[-1].finish_reason) == ([7] * 4, FinishReason.LENGTH)
    assert not engine.update_request(name, [7])


def test_update_request_waits_for_the_log_probabilities_of_the_prompt() -> None:
    engine = fake_engine()
    name = engine.add_request([5, 6], greedy(4, ignore_eos=True, echo=True, logprobs=1))
    with pytest.raises(InvalidRequest, match="requests log-probabilities of its prompt; update it after its first"):
        engine.update_request(name, [7])
    events: list[GenerationEvent] = []
    while not tokens_of(events, name):
        events += engine.step()
    assert engine.update_request(name, [7])


def test_an_exception_in_on_event_cancels_the_other_prompts() -> None:
    engine = fake_engine()

    def fail(_i: int, _event: GenerationEvent) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as failed:
        engine.generate([[5, 6], [7, 8]], greedy(8, ignore_eos=True), on_event=fail)
    assert failed.tb, "the traceback keeps the frames of the call"
    assert not engine.core.sequences
