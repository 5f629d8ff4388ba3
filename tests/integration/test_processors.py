"""A request's own `logits_processor`: its arguments, what it may do, and that its errors affect no other request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from cppbatch import BatchInferenceEngine, FinishReason, SamplingParams
from tests.support.fakes import fake_engine
from tests.support.fixtures import shared_engine
from tests.support.logits_processors import (
    PROMPTS,
    Together,
    assert_all_is_free,
    fill_with_nan,
    forbid_all,
    one_nan,
    raise_it,
    tokens_of,
)

Tokens = npt.NDArray[np.int32]

Row = npt.NDArray[np.float32]

SETTINGS: dict[str, Any] = {
    "n_ctx": 1024,
    "n_parallel": 4,
    "n_batch": 64,
    "n_threads": 1,
    "flash_attn": "off",
    "kv_layout": "unified",
}

TEXTS = ["a", "Hello", "the cat " * 3, "what will they say when ", "1+1=", "x" * 70]


def only(token: int) -> Callable[[Tokens, Row], None]:
    """Leaves nothing but this token."""

    def leave(_: Tokens, row: Row) -> None:
        likelihood = row[token]
        row[:] = -np.inf
        row[token] = likelihood

    return leave


def identity(_: Tokens, row: Row) -> Row:
    changed: Row = row.copy()
    return changed


HARMLESS = (identity, Together(identity))

GREEDY_KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "penalties": {"temperature": 0, "repetition_penalty": 1.5, "presence_penalty": 1.0},
}

KINDS: dict[str, dict[str, Any]] = {
    **GREEDY_KINDS,
    "drawn": {"temperature": 5.0, "top_k": 20},
    "typical_p": {"temperature": 5.0, "typical_p": 0.9},
    "mirostat": {"temperature": 5.0, "mirostat": 2},
    "xtc": {"temperature": 5.0, "xtc_probability": 0.5},
    "logit_bias": {"temperature": 5.0, "logit_bias": {"30": 5.0}},
    "a grammar": {"temperature": 5.0, "guided_regex": "[a-p]{12}"},
}

each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)

each_greedy_kind = pytest.mark.parametrize(
    "kind", [*GREEDY_KINDS.values(), {"temperature": 0, "dry_multiplier": 1.0}], ids=[*GREEDY_KINDS, "dry"]
)


def seeded(kind: dict[str, Any], **more: Any) -> list[SamplingParams]:
    return [SamplingParams(seed=i, max_tokens=12, ignore_eos=True, **kind, **more) for i in range(len(PROMPTS))]


@pytest.mark.each_value
@each_kind
@pytest.mark.parametrize("processor", HARMLESS, ids=["one by one", "together"])
def test_one_that_changes_nothing_leaves_every_seeded_text_as_it_is(kind: dict[str, Any], processor: Any) -> None:
    plain, processed = seeded(kind, logprobs=0), seeded(kind, logits_processor=processor)  # both take token by token
    expected = tokens_of(fake_engine().generate(PROMPTS, plain))
    assert tokens_of(fake_engine().generate(PROMPTS, processed)) == expected
    mixed = [(plain, processed)[i % 2][i] for i in range(len(PROMPTS))]
    assert tokens_of(fake_engine().generate(PROMPTS, mixed)) == expected


@each_kind
def test_its_mistakes_change_no_seeded_text(kind: dict[str, Any]) -> None:
    alone = tokens_of(fake_engine().generate(PROMPTS, seeded(kind)))
    for bad in (raise_it, fill_with_nan, Together(forbid_all), Together(raise_it)):
        engine = fake_engine(n_parallel=6)
        results = engine.generate(PROMPTS * 2, [*seeded(kind), *seeded(kind, logits_processor=bad)])
        assert tokens_of(results[: len(PROMPTS)]) == alone
        assert all(result.error for result in results[len(PROMPTS) :])
        assert_all_is_free(engine)


engine = shared_engine(**SETTINGS)


@each_greedy_kind
def test_among_llama_cpps_own_rows_nothing_spreads_either(engine: BatchInferenceEngine, kind: dict[str, Any]) -> None:
    good = SamplingParams(max_tokens=12, ignore_eos=True, **kind)
    expected = tokens_of(engine.generate(TEXTS, good))
    for processor in (*HARMLESS, raise_it, fill_with_nan, one_nan, Together(forbid_all)):
        other = SamplingParams(max_tokens=12, ignore_eos=True, logits_processor=processor, **kind)
        results = engine.generate(TEXTS * 2, [good] * len(TEXTS) + [other] * len(TEXTS))
        assert tokens_of(results[: len(TEXTS)]) == expected
        changed = expected if processor in HARMLESS else [[]] * len(TEXTS)
        assert tokens_of(results[len(TEXTS) :]) == changed


@pytest.mark.parametrize("kind", [*KINDS.values(), {"temperature": 0, "dry_multiplier": 1.0}], ids=[*KINDS, "dry"])
@pytest.mark.parametrize("together", [False, True])
def test_every_way_of_sampling_draws_from_what_it_leaves(
    engine: BatchInferenceEngine, kind: dict[str, Any], together: bool
) -> None:
    token = int(engine.core.runtime.vocab.tokenize("n", add_special=False)[0])
    processor = Together(only(token)) if together else only(token)
    params = [SamplingParams(seed=i, max_tokens=5, logits_processor=processor, **kind) for i in range(len(TEXTS))]
    assert [result.text for result in engine.generate(TEXTS, params)] == ["nnnnn"] * len(TEXTS)


def test_penalties_and_biases_come_after_it(engine: BatchInferenceEngine) -> None:
    def two_alike(_: Tokens, row: Row) -> None:
        row[:] = 0
        row[300], row[301] = 10, 9

    def tokens(**more: Any) -> list[int]:
        params = SamplingParams(temperature=0, max_tokens=6, logits_processor=two_alike, **more)
        return engine.generate(["a"], params)[0].tokens

    assert tokens() == [300] * 6
    assert tokens(frequency_penalty=1.5) == [300, 301, 300, 301, 300, 301]
    assert tokens(logit_bias={301: 5}) == [301] * 6
    assert tokens(suppress_tokens=(300,)) == [301] * 6
    assert tokens(suppress_tokens=(300, 301), logit_bias={302: 0.5}) == [302] * 6


def test_no_processor_brings_back_what_is_forbidden(engine: BatchInferenceEngine) -> None:
    eos = min(engine.core.runtime.vocab.eog)

    def end(_: Tokens, row: Row) -> None:
        row[eos] = 1000

    def tokens(**more: Any) -> list[int]:
        params = SamplingParams(temperature=0, max_tokens=6, logits_processor=end, **more)
        return engine.generate(["a"], params)[0].tokens

    assert tokens() == []
    assert len(tokens(ignore_eos=True)) == 6
    assert len(tokens(min_tokens=4)) == 4
    assert len(tokens(suppress_tokens=(eos,))) == 6


def test_a_grammar_holds_whatever_it_prefers(engine: BatchInferenceEngine) -> None:
    letter, digit = (int(engine.core.runtime.vocab.tokenize(text, add_special=False)[0]) for text in "z7")

    def prefer(_: Tokens, row: Row) -> None:
        row[letter], row[digit] = 1000, 900

    for temperature in (0, 1):
        params = SamplingParams(
            temperature=temperature, seed=1, max_tokens=20, guided_regex="[0-9]{3}z", logits_processor=prefer
        )
        (result,) = engine.generate(["a"], params)
        assert (result.text, result.finish_reason) == ("777z", FinishReason.STOP)


def test_within_a_grammar_it_sees_every_token_one_by_one(engine: BatchInferenceEngine) -> None:
    lengths: list[int] = []
    params = SamplingParams(
        temperature=0,
        max_tokens=40,
        guided_choice=("the only one",),
        logits_processor=lambda t, _: lengths.append(len(t)),
    )
    (result,) = engine.generate(["a"], params)
    assert result.text == "the only one"
    assert lengths == list(range(result.usage.prompt_tokens, result.usage.prompt_tokens + len(result.tokens)))


def test_greedy_of_the_reversed_logits_is_the_least_likely_token(engine: BatchInferenceEngine) -> None:
    (worst,) = engine.generate(["a"], SamplingParams(temperature=0, max_tokens=1, logits_processor=lambda _, row: -row))
    seen: list[int] = []
    note = SamplingParams(temperature=0, max_tokens=1, logits_processor=lambda _, row: seen.append(int(row.argmin())))
    engine.generate(["a"], note)
    assert worst.tokens == seen
