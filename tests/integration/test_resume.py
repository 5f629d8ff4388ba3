"""A request that continues in another engine, from any token on, has the same events as in the first one."""

from __future__ import annotations

from typing import Any

import pytest

from cppbatch import BatchInferenceEngine, FinishReason, GenerationEvent, GenerationRequest, SamplingParams
from cppbatch.chat.reasoning import ThinkingBudget
from cppbatch.config import KvLayout
from cppbatch.engine.request import ResumeState
from tests.support.fixtures import shared_engine

SETTINGS: dict[str, Any] = {"n_ctx": 512, "n_parallel": 4, "n_threads": 1}
FLOATS: dict[str, Any] = {"cache_type_k": "f32", "cache_type_v": "f32"}

KINDS = {
    "greedy": SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
    "seeded": SamplingParams(seed=5, temperature=1.5, max_tokens=12, ignore_eos=True),
    "penalties": SamplingParams(
        seed=6, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.3, max_tokens=12, ignore_eos=True
    ),
    "llama.cpp's samplers": SamplingParams(
        seed=7, typical_p=0.9, dry_multiplier=0.8, xtc_probability=0.5, max_tokens=12, ignore_eos=True
    ),
    "a grammar": SamplingParams(
        seed=8, max_tokens=40, json_schema={"type": "array", "items": {"type": "integer", "maximum": 99}, "maxItems": 5}
    ),
    "a minimum": SamplingParams(seed=9, min_tokens=9, max_tokens=12),
    "log-probabilities": SamplingParams(seed=10, logprobs=3, max_tokens=8, ignore_eos=True),
    "an echo with log-probabilities": SamplingParams(seed=11, echo=True, logprobs=1, max_tokens=8, ignore_eos=True),
    "a limit of the reasoning": SamplingParams(
        seed=13,
        temperature=1.5,
        reasoning_budget=ThinkingBudget(n_tokens=4, start="<t>", end="</t>", closing="</t>", is_open=True),
        max_tokens=14,
        ignore_eos=True,
    ),
    "letters of several tokens": SamplingParams(
        seed=12, temperature=0, max_tokens=6, ignore_eos=True, grammar='root ::= "é日🙂"'
    ),
}

engine = shared_engine(**SETTINGS, **FLOATS)


def run(
    engine: BatchInferenceEngine, request: GenerationRequest, progress: ResumeState | None
) -> list[GenerationEvent]:
    engine.add(engine.prepare(request, progress))
    events = []
    while engine.has_work:
        events += engine.step()
    return events


def told(events: list[GenerationEvent]) -> tuple[str, list[int], list[tuple[int, int]], object]:
    logprobs = [(entry.token, entry.text_offset) for event in events for entry in event.logprobs]
    tokens = [token for event in events for token in event.tokens]
    return "".join(event.text for event in events), tokens, logprobs, events[-1].finish_reason


@pytest.mark.parametrize("params", KINDS.values(), ids=KINDS.keys())
def test_it_continues_from_any_token_with_the_same_text(engine: BatchInferenceEngine, params: SamplingParams) -> None:
    request = GenerationRequest(id="a", prompt="Once upon a time", params=params, cache_prompt=False)
    whole = run(engine, request, None)
    for n_events in range(len(whole)):
        known, rest = whole[:n_events], whole[n_events:]
        tokens = [token for event in known for token in event.tokens]
        progress = ResumeState(tokens=tokens, age=1.0, first_token_seconds=0.2)
        assert told(run(engine, request, progress)) == told(rest)


def test_a_stop_string_that_started_earlier_still_ends_the_text(engine: BatchInferenceEngine) -> None:
    free = GenerationRequest(id="a", prompt="Hello", params=KINDS["greedy"])
    text, tokens, *_ = told(run(engine, free, None))
    assert len(text) > 4
    stop = text[1:4]
    stopped = GenerationRequest(
        id="a", prompt="Hello", params=SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop=(stop,))
    )
    whole = run(engine, stopped, None)
    assert told(whole)[3] is FinishReason.STOP
    for n in range(1, len(whole)):
        known = [token for event in whole[:n] for token in event.tokens]
        progress = ResumeState(tokens=known, age=0, first_token_seconds=0)
        assert told(run(engine, stopped, progress)) == told(whole[n:])
    assert tokens[: len(told(whole)[1])] == told(whole)[1]


def test_times_count_from_the_first_arrival(engine: BatchInferenceEngine) -> None:
    request = GenerationRequest(id="a", prompt="Hello", params=KINDS["greedy"], timeout=100, queue_timeout=1)
    progress = ResumeState(tokens=[50, 51], age=50.0, first_token_seconds=3.0)
    usage = run(engine, request, progress)[-1].usage
    assert usage
    assert usage.completion_tokens == 12
    assert usage.first_token_seconds == pytest.approx(3.0)
    assert usage.total_seconds >= 50


def test_a_timeout_that_passed_meanwhile_ends_it(engine: BatchInferenceEngine) -> None:
    request = GenerationRequest(id="a", prompt="Hello", params=KINDS["greedy"], timeout=10)
    progress = ResumeState(tokens=[50], age=11.0, first_token_seconds=0)
    steps = engine.stats().steps
    (event,) = run(engine, request, progress)
    assert (event.finish_reason, event.text) == (FinishReason.TIMEOUT, "")
    assert engine.stats().steps <= steps + 1


KNOWN = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True, logprobs=1)
MODELS = ["tiny_llama", "tiny_swa", "tiny_hybrid", "tiny_mamba"]
NOISE = 0.001  # what orders of sums may change in F32; one that is rounded to F16 changes 0.002 to 0.01


def logprobs(events: list[GenerationEvent], request_id: str) -> list[float | None]:
    """The log-probabilities of the tokens in these events of a request, each the most likely one."""
    return [entry.logprob for event in events if event.request_id == request_id for entry in event.logprobs]


def numbered(n: int) -> list[int]:
    return [3 + (7 * k + n) % 200 for k in range(n)]


@pytest.mark.each_value
@pytest.mark.parametrize("layout", ["per-sequence", "unified"])
@pytest.mark.parametrize("name", MODELS)
def test_f32_logits_are_kept_when_the_text_continues_in_another_engine(
    request: pytest.FixtureRequest, name: str, layout: KvLayout
) -> None:
    """Whether tokens are computed one by one, in pieces of 64 and more, or after 512 cells, from where ggml's flash
    attention adds in other orders."""
    settings: dict[str, Any] = {**SETTINGS, "n_ctx": 2048, "n_parallel": 2, "kv_layout": layout, **FLOATS}
    with BatchInferenceEngine(request.getfixturevalue(name), **settings) as engine:
        for n_prompt in (20, 100, 500):
            again = GenerationRequest(id="a", prompt=numbered(n_prompt), params=KNOWN, cache_prompt=False)
            whole = run(engine, again, None)
            tokens, expected = told(whole)[1], logprobs(whole, "a")
            for n in (30, 70):
                rest = run(engine, again, ResumeState(tokens=tokens[:n], age=1.0, first_token_seconds=0.2))
                assert told(rest)[1] == tokens[n:]
                assert logprobs(rest, "a") == pytest.approx(expected[n:], abs=NOISE)


@pytest.mark.each_value
@pytest.mark.parametrize("layout", ["per-sequence", "unified"])
@pytest.mark.parametrize("name", MODELS)
def test_f32_logits_stay_where_preempted_sequences_are_computed_again(
    request: pytest.FixtureRequest, name: str, layout: KvLayout
) -> None:
    settings: dict[str, Any] = {**SETTINGS, "n_ctx": 2048, "n_parallel": 2, "kv_layout": layout, **FLOATS}
    settings["spec"] = "off"  # drafts that come true could end the second text before the others arrive
    prompts = [numbered(n) for n in (20, 100, 30, 50)]
    with BatchInferenceEngine(request.getfixturevalue(name), **settings, prefix_cache=False, swap_space=0) as engine:
        alone = [engine.generate([prompt], KNOWN)[0] for prompt in prompts]
        ids = [engine.add_request(prompt, KNOWN) for prompt in prompts[:2]]
        events: list[GenerationEvent] = []
        while len(logprobs(events, ids[0])) < 50:
            events += engine.step()
        ids += [engine.add_request(prompt, KNOWN, priority=-1) for prompt in prompts[2:]]
        while engine.has_work:
            events += engine.step()
        assert engine.stats().recomputes == 2
    for id, wanted in zip(ids, alone, strict=True):
        assert logprobs(events, id) == pytest.approx([each.logprob for each in wanted.logprobs or ()], abs=NOISE)
