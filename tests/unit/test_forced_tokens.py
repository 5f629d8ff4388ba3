"""Structured output over a fake model: forced tokens, stops within them, and grammars that leave no token."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator

import pytest

from cppbatch import BatchInferenceEngine, Completion, FinishReason, GenerationEvent, InvalidRequest, SamplingParams
from tests.support.fakes import EOG, context_of, drain, fake_engine, greedy, reference, run_steps, spell

PROMPT = "what will they say"


@pytest.fixture
def fakes() -> Iterator[Callable[..., BatchInferenceEngine]]:
    """Makes fake engines, and closes them at the end."""
    with contextlib.ExitStack() as stack:
        yield lambda **its: stack.enter_context(fake_engine(**its))


def one(engine: BatchInferenceEngine, params: SamplingParams, prompt: str | list[int] = PROMPT) -> Completion:
    (result,) = engine.generate([prompt], params)
    return result


def text_of(events: list[GenerationEvent], name: str) -> str:
    return "".join(event.text for event in events if event.request_id == name)


LETTERS = "dponmlkjihgfeefghijklm"


def test_forced_tokens_take_no_decode(fakes: Callable[..., BatchInferenceEngine]) -> None:
    engine = fakes()
    result = one(engine, greedy(40, guided_regex=LETTERS), [1, 2])
    assert (result.text, result.tokens, result.finish_reason) == (LETTERS, spell(LETTERS), FinishReason.STOP)
    assert engine.stats().forced_tokens == len(LETTERS) - 1
    assert context_of(engine).steps == [{0: 2}]
    assert result.usage.completion_tokens == engine.stats().generated_tokens == len(LETTERS)


def test_forced_tokens_in_the_middle_are_computed_together_when_the_next_is_to_be_chosen(
    fakes: Callable[..., BatchInferenceEngine],
) -> None:
    engine = fakes(n_batch=64)
    result = one(engine, greedy(40, guided_regex=f"[ij]{LETTERS}[kl]"), [1, 2])
    assert re.fullmatch(f"[ij]{LETTERS}[kl]", result.text)
    assert context_of(engine).steps == [{0: 2}, {0: 1 + len(LETTERS)}]


def test_a_text_is_the_same_with_and_without_forced_tokens(fakes: Callable[..., BatchInferenceEngine]) -> None:
    engine = fakes(n_ctx=256)
    regex = "([d-p]{3}ijkl|[d-f]{2}mnop){4}[g-k]"
    prompts = [[i, i + 1] for i in range(12)]
    forced = engine.generate(prompts, greedy(60, guided_regex=regex))
    assert engine.stats().forced_tokens > 100
    n_forced = engine.stats().forced_tokens
    unforced = engine.generate(prompts, greedy(60, guided_regex=regex, logprobs=0))
    assert engine.stats().forced_tokens == n_forced
    assert [(its.tokens, its.text, its.finish_reason) for its in forced] == [
        (its.tokens, its.text, its.finish_reason) for its in unforced
    ]
    assert all(len(its.logprobs) == len(its.tokens) for its in unforced)


@pytest.mark.parametrize("max_tokens", range(1, len(LETTERS) + 1))
def test_forced_tokens_are_never_more_than_max_tokens(
    fakes: Callable[..., BatchInferenceEngine], max_tokens: int
) -> None:
    result = one(fakes(), greedy(max_tokens, guided_regex=LETTERS), [1, 2])
    assert (result.text, len(result.tokens)) == (LETTERS[:max_tokens], max_tokens)
    assert result.finish_reason is (FinishReason.STOP if max_tokens == len(LETTERS) else FinishReason.LENGTH)


@pytest.mark.parametrize("include_stop", [False, True])
def test_a_stop_string_within_forced_text_ends_it(
    fakes: Callable[..., BatchInferenceEngine], include_stop: bool
) -> None:
    params = greedy(40, guided_regex=LETTERS, stop=("zz", "kji", "gf"), include_stop=include_stop)
    result = one(fakes(), params, [1, 2])
    assert (result.text, result.finish_reason) == ("dponml" + "kji" * include_stop, FinishReason.STOP)
    assert result.tokens == spell("dponmlkji")


def test_a_stop_token_within_forced_text_ends_it_and_is_not_part_of_it(
    fakes: Callable[..., BatchInferenceEngine],
) -> None:
    result = one(fakes(), greedy(40, guided_regex=LETTERS, stop_token_ids=tuple(spell("k"))), [1, 2])
    assert (result.text, result.tokens, result.finish_reason) == ("dponml", spell("dponml"), FinishReason.STOP)


def test_a_suppressed_token_is_not_forced_either(fakes: Callable[..., BatchInferenceEngine]) -> None:
    result = one(fakes(), greedy(40, guided_regex=LETTERS, suppress_tokens=tuple(spell("k"))), [1, 2])
    assert not set(spell("k")) & set(result.tokens)


def test_forced_tokens_of_many_requests_are_computed_within_the_limit_of_a_step(
    fakes: Callable[..., BatchInferenceEngine],
) -> None:
    engine = fakes(n_ctx=512, n_parallel=8, n_batch=8)
    results = engine.generate([[i, 1] for i in range(8)], greedy(60, guided_regex=f"([ij]{LETTERS}){{2}}[kl]"))
    assert all(re.fullmatch(f"([ij]{LETTERS}){{2}}[kl]", result.text) for result in results)
    assert max(sum(step.values()) for step in context_of(engine).steps) <= 8


MIXED = ("([a-p]{3}dponm){4}", "[ij]ponmlkjihgfed[a-p ]{4}ponmlkjihgfed[k-p]", "([a-p ]{12}lmno)+ponm", "[a-p]{30}")


def mixed_params(n: int) -> list[SamplingParams]:
    return [greedy(40, guided_regex=MIXED[i % 5]) if i % 5 < 4 else greedy(40, ignore_eos=True) for i in range(n)]


def mixed_texts(engine: BatchInferenceEngine, n: int) -> list[str]:
    return [result.text for result in engine.generate([[i, i + 1, i + 2] for i in range(n)], mixed_params(n))]


@pytest.mark.parametrize("unified", [True, False], ids=["unified", "per-sequence"])
@pytest.mark.parametrize("swap_space", [0, 2, 1024])
def test_preempted_constrained_texts_are_those_of_ample_cells(
    fakes: Callable[..., BatchInferenceEngine], swap_space: int, unified: bool
) -> None:
    ample = mixed_texts(fakes(n_ctx=1024), 20)
    for text, its in zip(ample, mixed_params(20), strict=True):
        assert its.guided_regex is None or its.max_tokens == 40 or re.fullmatch(its.guided_regex, text)
    engine = fakes(n_ctx=96 if unified else 8 * 48, n_parallel=8, swap_space=swap_space, unified=unified)
    assert mixed_texts(engine, 20) == ample
    stats = engine.stats()
    assert stats.forced_tokens > 100
    if unified:
        assert (stats.swaps > 0) == (swap_space > 0)
        assert (stats.recomputes > 0) == (swap_space < 1024)
    assert (stats.kv_cells_used, stats.swapped_bytes) == (0, 0)


def interrupt_sampling(engine: BatchInferenceEngine, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(engine.core._sampler, "sample", interrupt)


def interrupt_advancing(engine: BatchInferenceEngine, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(engine.core.outputs, "accept", interrupt)


def interrupt_between_tokens(engine: BatchInferenceEngine, patch: pytest.MonkeyPatch) -> None:
    piece, counter = engine.core.runtime.vocab.piece, iter(range(100))
    patch.setattr(
        engine.core.runtime.vocab,
        "piece",
        lambda *args, **its: interrupt() if next(counter) == 5 else piece(*args, **its),
    )


def drain_into(events: list[GenerationEvent], engine: BatchInferenceEngine) -> None:
    while engine.has_work:
        events += engine.step()


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    "moment", [interrupt_sampling, interrupt_advancing, interrupt_between_tokens], ids=lambda moment: moment.__name__
)
@pytest.mark.parametrize("n_steps", [0, 1, 4])
def test_ctrl_c_in_a_step_leaves_constrained_texts_whole(
    fakes: Callable[..., BatchInferenceEngine],
    moment: Callable[[BatchInferenceEngine, pytest.MonkeyPatch], None],
    n_steps: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = mixed_texts(fakes(n_ctx=1024), 4)
    engine = fakes(n_ctx=1024, n_batch=64)
    names = [engine.add_request([i, i + 1, i + 2], its) for i, its in enumerate(mixed_params(4))]
    events = run_steps(engine, n_steps)
    with monkeypatch.context() as broken:
        moment(engine, broken)
        with pytest.raises(KeyboardInterrupt):
            drain_into(events, engine)
    events += drain(engine)
    assert [text_of(events, name) for name in names] == whole


def test_a_finished_grammar_ends_at_once_without_a_step_for_its_end(fakes: Callable[..., BatchInferenceEngine]) -> None:
    engine = fakes()
    result = one(engine, greedy(40, guided_regex="[d-f]{4}"), [1, 2])
    assert result.finish_reason is FinishReason.STOP
    assert len(result.tokens) == len(context_of(engine).steps) == 4
    assert not EOG & set(result.tokens)


def test_where_a_grammar_allows_both_the_model_says_whether_its_text_ends(
    fakes: Callable[..., BatchInferenceEngine],
) -> None:
    engine = fakes(n_ctx=256)
    results = engine.generate([[i] for i in range(20)], greedy(30, guided_regex="([d-p]{2})*"))
    ends = [result for result in results if result.finish_reason is FinishReason.STOP]
    assert {len(result.text) % 2 for result in ends} == {0}
    assert len({len(result.text) for result in ends}) > 3


def test_a_grammar_that_the_vocabulary_cannot_spell_is_not_reported_as_an_ended_text(
    fakes: Callable[..., BatchInferenceEngine],
) -> None:
    with contextlib.suppress(InvalidRequest):  # the earlier the better
        result = one(fakes(), greedy(9, guided_regex="d[xyz]"), [1, 2])
        assert (result.finish_reason, bool(result.error)) == (FinishReason.ERROR, True)


def test_where_everything_allowed_is_suppressed_the_request_ends_with_an_error_and_no_other_does(
    fakes: Callable[..., BatchInferenceEngine],
) -> None:
    params = [greedy(9, guided_regex="d[ef]", suppress_tokens=tuple(spell("ef"))), greedy(9)]
    stuck, free = fakes().generate([[1, 2]] * 2, params)
    assert (stuck.finish_reason, bool(stuck.error)) == (FinishReason.ERROR, True)
    assert (free.tokens, free.text, free.finish_reason) == reference([1, 2], greedy(9))
