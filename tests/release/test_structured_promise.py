"""What structured output promises, on the default model: JSON that jsonschema finds no fault with, at full speed."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import msgspec
import pytest

from cppbatch import BatchInferenceEngine, Completion, FinishReason, SamplingParams
from tests.support.schemas import SCHEMAS, Schema, fault

Requests = list[tuple[str, SamplingParams]]

BEGINNINGS = (
    "The river floods every", "My dog never", "In 1820 the town", "She opened the door and", "A good cook knows",
    "The moon is", "Every morning they", "Once there was", "Our teacher said that", "Two ships sailed",
)  # fmt: skip


def open_engine(model: Path, **settings: Any) -> BatchInferenceEngine:
    """With nothing kept of other runs; the first requests, which are slower, are made already."""
    engine = BatchInferenceEngine(model, n_ctx=16384, n_parallel=16, prefix_cache=False, **settings)
    engine.generate(["Hello"] * 2, [SamplingParams(max_tokens=4), SamplingParams(max_tokens=4, guided_regex="[a-z]+")])
    return engine


def constrained(n_of_each: int, *, max_tokens: int = 160, first_seed: int = 0) -> Requests:
    """Requests for every schema, one after the other."""
    requests = []
    for seed in range(first_seed, first_seed + n_of_each):
        for question, schema in SCHEMAS.values():
            prompt = f"<|im_start|>user\n{question} Answer in JSON.<|im_end|>\n<|im_start|>assistant\n"
            params = SamplingParams(temperature=0.8, seed=seed, max_tokens=max_tokens, json_schema=schema)
            requests.append((prompt, params))
    return requests


def free(n: int, *, max_tokens: int, first_seed: int = 0) -> Requests:
    """Requests for text of any kind."""
    return [
        (BEGINNINGS[i % len(BEGINNINGS)], SamplingParams(temperature=0.8, seed=first_seed + i, max_tokens=max_tokens))
        for i in range(n)
    ]


def mixed(many: Requests, few: Requests) -> Requests:
    """Both together, the few evenly among the many."""
    places = [(i / len(many), request) for i, request in enumerate(many)]
    places += [((i + 0.5) / len(few), request) for i, request in enumerate(few)]
    return [request for _, request in sorted(places, key=lambda place: place[0])]


def run(engine: BatchInferenceEngine, requests: Requests) -> tuple[float, list[Completion]]:
    """Seconds, and the results."""
    began = perf_counter()
    results = engine.generate([prompt for prompt, _ in requests], [params for _, params in requests])
    return perf_counter() - began, results


def schema_of(params: SamplingParams) -> Schema:
    assert isinstance(params.json_schema, str)
    schema: Schema = msgspec.json.decode(params.json_schema)
    return schema


def count_finished(requests: Requests, results: list[Completion]) -> int:
    """How many of the constrained ones finished. Fails if one of those has a fault, or ended in any other way."""
    n_finished = 0
    for (_, params), result in zip(requests, results, strict=True):
        if not params.is_constrained:
            continue
        if result.finish_reason is FinishReason.STOP:
            n_finished += 1
            assert fault(result.text, schema_of(params)) is None, f"{result.text!r} for {params.json_schema}"
        else:
            assert (result.finish_reason, len(result.tokens)) == (FinishReason.LENGTH, params.max_tokens)
    return n_finished


def test_all_finished_texts_match_and_nine_of_ten_finish_beside_free_texts(default_model: Path) -> None:
    requests = mixed(constrained(1), free(5, max_tokens=32))
    with open_engine(default_model) as engine:
        _, results = run(engine, requests)
    n_finished = count_finished(requests, results)
    print(f"{n_finished} of 20 finished")
    assert n_finished >= 18


@pytest.mark.parametrize("model", ["tiny_llama", pytest.param("f16_model", marks=pytest.mark.nightly)])
def test_free_texts_are_the_same_with_and_without_constrained_ones_among_them(
    model: str, request: pytest.FixtureRequest
) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=16)
    texts = [(prompt, greedy) for prompt, _ in free(6, max_tokens=16)]
    requests = mixed(constrained(1, max_tokens=8)[::3], texts)
    with open_engine(request.getfixturevalue(model), flash_attn="off") as engine:
        _, alone = run(engine, texts)
        _, results = run(engine, requests)
    among = [result for (_, its), result in zip(requests, results, strict=True) if not its.is_constrained]
    assert [result.text for result in among] == [result.text for result in alone]


def without_schemas(requests: Requests, results: list[Completion]) -> Requests:
    """The same prompts, and the same number of tokens for each, as free text."""
    return [
        (prompt, SamplingParams(temperature=0.8, seed=its.seed, max_tokens=len(result.tokens), ignore_eos=True))
        for (prompt, its), result in zip(requests, results, strict=True)
    ]


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_constrained_batch_is_nine_tenths_as_fast_as_the_same_without_its_schemas(default_model: Path) -> None:
    n_finished, ratios, n_tokens, seconds = 0, [], 0, [0.0, 0.0]
    with open_engine(default_model) as engine:
        for part in range(5):  # alternately, because other programs may disturb the machine
            requests = mixed(constrained(2, first_seed=2 * part), free(8, max_tokens=160, first_seed=8 * part))
            constrained_s, results = run(engine, requests)
            unconstrained_s, others = run(engine, without_schemas(requests, results))
            assert [len(result.tokens) for result in others] == [len(result.tokens) for result in results]
            n_finished += count_finished(requests, results)
            n_tokens += sum(len(result.tokens) for result in results)
            ratios.append(unconstrained_s / constrained_s)
            seconds = [seconds[0] + constrained_s, seconds[1] + unconstrained_s]
        n_forced = engine.stats().forced_tokens
    print(
        f"{n_finished} of 200 finished and are faultless; {n_tokens} tokens, {n_forced} of them forced: "
        f"{n_tokens / seconds[0]:.0f} tokens/s, {n_tokens / seconds[1]:.0f} without schemas; "
        f"{', '.join(f'{ratio:.0%}' for ratio in ratios)} as fast, {median(ratios):.0%} in the middle"
    )
    assert n_finished >= 180
    assert median(ratios) >= 0.9
