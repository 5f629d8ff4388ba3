"""BatchInferenceEngine over real llama.cpp contexts, with one tiny model of each kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from cppbatch import BatchInferenceEngine, FinishReason, SamplingParams
from cppbatch.errors import InvalidRequest
from tests.support import tiny_models
from tests.support.fakes import greedy
from tests.support.logits_processors import tokens_of
from tests.support.native_engines import PROMPTS, OpenEngine

KINDS = [
    ("tiny_llama", "unified"),
    ("tiny_llama", "per-sequence"),
    ("tiny_mamba", "unified"),
    ("tiny_swa", "unified"),
    ("tiny_swa", "per-sequence"),
    ("tiny_hybrid", "unified"),
    ("tiny_hybrid", "per-sequence"),
]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(params=KINDS, ids=[f"{model}-{layout}" for model, layout in KINDS])
def kind(request: pytest.FixtureRequest) -> tuple[Path, str]:
    """A model's path and a KV layout."""
    name, layout = request.param
    return request.getfixturevalue(name), layout


@pytest.fixture
def engine(open_engine: OpenEngine, tiny_llama: Path) -> BatchInferenceEngine:
    return open_engine(tiny_llama)


def drain(engine: BatchInferenceEngine) -> dict[str, list[int]]:
    """Steps until nothing runs; each request's tokens."""
    tokens: dict[str, list[int]] = {}
    for _ in range(2000):
        if not engine.has_work:
            return tokens
        for event in engine.step():
            tokens.setdefault(event.request_id, []).extend(event.tokens)
    raise AssertionError("the engine does not come to an end")


@pytest.mark.parametrize("model", ["tiny_llama", "tiny_swa"])
def test_a_sequence_that_moves_to_a_gap_continues_its_text(
    open_engine: OpenEngine, model: str, request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(model)
    engine = open_engine(path, kv_layout="per-sequence", n_parallel=4, spec="off")
    engine.core.scheduler.computed = lambda *_: None  # type: ignore[method-assign]  # learn no other times
    engine.core.scheduler._budgets.of(()).cost.seed([(n, 0.005 + 0.005 * n) for n in range(1, 5)])
    short, long = (msgspec.structs.replace(GREEDY, max_tokens=n) for n in (4, 40))
    ids = [
        engine.add_request(prompt, params) for prompt, params in zip(PROMPTS, [long, short, long, long], strict=False)
    ]
    texts: dict[str, list[int]] = {}
    held = set()
    while engine.has_work:
        for event in engine.step():
            texts.setdefault(event.request_id, []).extend(event.tokens)
        held.add(tuple(sorted(engine.core.kv.running)))
    assert (0, 1, 2) in held, "the sequence of seq_id 3 has moved to seq_id 1"
    for i in (0, 2, 3):
        alone = open_engine(path, kv_layout="per-sequence", spec="off")
        assert tokens_of(alone.generate([PROMPTS[i]], long)) == [texts[ids[i]]]


# --- the same text, whatever else runs -----------------------------------------------------------------------------


def test_greedy_text_batched_equals_each_prompt_alone_in_a_fresh_engine(
    open_engine: OpenEngine, kind: tuple[Path, str]
) -> None:
    path, layout = kind
    batched = open_engine(path, kv_layout=layout).generate(PROMPTS, GREEDY)
    alone = [open_engine(path, kv_layout=layout, n_parallel=1).generate([prompt], GREEDY)[0] for prompt in PROMPTS]
    assert [result.text for result in batched] == [result.text for result in alone]
    assert tokens_of(batched) == tokens_of(alone)
    assert len({tuple(result.tokens) for result in batched}) == len(PROMPTS)
    assert all(result.finish_reason is FinishReason.LENGTH for result in batched)


def test_requests_join_and_leave_at_any_step_without_changing_the_others(
    open_engine: OpenEngine, kind: tuple[Path, str]
) -> None:
    path, layout = kind
    expected = tokens_of(open_engine(path, kv_layout=layout).generate(PROMPTS, GREEDY))
    engine = open_engine(path, kv_layout=layout)
    tokens: dict[str, list[int]] = {}
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(prompt, GREEDY, request_id=str(i))
        engine.add_request(prompt * 2, GREEDY, request_id=f"leaves-{i}")
        for _ in range(i % 3 + 1):
            for event in engine.step():
                tokens.setdefault(event.request_id, []).extend(event.tokens)
        assert engine.cancel(f"leaves-{i}")
        engine.core.kv.check()
    for request_id, rest in drain(engine).items():
        tokens.setdefault(request_id, []).extend(rest)
    assert [tokens[str(i)] for i in range(len(PROMPTS))] == expected


def test_seeded_sampling_batched_draws_the_same_as_alone(open_engine: OpenEngine, kind: tuple[Path, str]) -> None:
    path, layout = kind
    n = len(PROMPTS)
    params = [SamplingParams(temperature=1, top_k=5, seed=i, max_tokens=12, ignore_eos=True) for i in range(n)]
    batched = tokens_of(open_engine(path, kv_layout=layout).generate(PROMPTS, params))
    engine = open_engine(path, kv_layout=layout)
    alone = [engine.generate([prompt], its)[0].tokens for prompt, its in zip(PROMPTS, params, strict=True)]
    same = sum(mine == theirs for mine, theirs in zip(batched, alone, strict=True))
    assert same >= n - 1  # a key rounded to float16 the other way may move a draw; a shared random state moves all


def test_another_seed_gives_another_text(open_engine: OpenEngine, kind: tuple[Path, str]) -> None:
    path, layout = kind
    params = [SamplingParams(temperature=1, seed=i, max_tokens=12, ignore_eos=True) for i in range(8)]
    results = open_engine(path, kv_layout=layout).generate(["Hello"] * 8, params)
    assert len({tuple(result.tokens) for result in results}) == 8


def test_a_text_continued_from_its_own_tokens_is_the_same(open_engine: OpenEngine, kind: tuple[Path, str]) -> None:
    path, layout = kind
    engine = open_engine(path, kv_layout=layout)
    prompt = [1, *range(300, 380)]  # well beyond the sliding window
    whole = engine.generate([prompt], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))[0].tokens
    for n in (1, 10, tiny_models.WINDOW, 39):
        rest = SamplingParams(temperature=0, max_tokens=40 - n, ignore_eos=True)
        assert engine.generate([prompt + whole[:n]], rest)[0].tokens == whole[n:]


def test_seq_ids_used_again_carry_nothing_over(open_engine: OpenEngine, kind: tuple[Path, str]) -> None:
    path, layout = kind
    engine = open_engine(path, kv_layout=layout)
    first = tokens_of(engine.generate(PROMPTS, GREEDY))
    assert tokens_of(engine.generate(PROMPTS, GREEDY)) == first


# --- layouts and limits --------------------------------------------------------------------------------------------


def test_one_request_may_fill_the_whole_unified_context(open_engine: OpenEngine, tiny_llama: Path) -> None:
    engine = open_engine(tiny_llama, n_ctx=256)
    result = engine.generate(["x" * 100], SamplingParams(max_tokens=256 - 101, ignore_eos=True))[0]
    assert len(result.tokens) == 155


def test_every_stream_may_be_filled_to_its_last_cell(open_engine: OpenEngine, tiny_llama: Path) -> None:
    engine = open_engine(tiny_llama, kv_layout="per-sequence")
    assert engine.info.max_sequence == 256
    results = engine.generate(["x" * 200] * 6, SamplingParams(max_tokens=55, ignore_eos=True))
    assert [len(result.tokens) for result in results] == [55] * 6


def test_more_requests_than_cells_wait_and_all_end_well(open_engine: OpenEngine, tiny_llama: Path) -> None:
    engine = open_engine(tiny_llama, n_ctx=256)
    results = engine.generate(["x" * 80] * 12, SamplingParams(max_tokens=40, ignore_eos=True))
    assert [result.finish_reason for result in results] == [FinishReason.LENGTH] * 12


@pytest.mark.each_value
@pytest.mark.parametrize("swap_space", [64, 0], ids=["swapped", "recomputed"])
@pytest.mark.parametrize("model", ["tiny_llama", "tiny_mamba", "tiny_swa", "tiny_hybrid"])
def test_requests_that_outgrow_a_tiny_cache_get_the_texts_of_an_ample_one(
    open_engine: OpenEngine, request: pytest.FixtureRequest, model: str, swap_space: int
) -> None:
    path, params = request.getfixturevalue(model), SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
    tiny, ample = open_engine(path, n_ctx=256, n_parallel=6, swap_space=swap_space), open_engine(path, n_ctx=4096)
    assert tokens_of(tiny.generate(PROMPTS, params)) == tokens_of(ample.generate(PROMPTS, params))
    stats = tiny.stats()
    assert stats.swaps + stats.recomputes > 0
    assert (stats.swaps > 0) == (swap_space > 0)


def test_an_encoder_refuses_to_generate_text(tiny_encoder: Path) -> None:
    with (
        BatchInferenceEngine(tiny_encoder, n_ctx=256, n_parallel=1, n_threads=1) as engine,
        pytest.raises(InvalidRequest, match=r"tiny-encoder runs as an embedding model.*does not generate text"),
    ):
        engine.generate(["hello"])


def test_closing_an_engine_ends_running_requests(tiny_llama: Path) -> None:
    engine = BatchInferenceEngine(tiny_llama, n_ctx=1024, n_parallel=4, n_threads=1)
    for prompt in PROMPTS:
        engine.add_request(prompt, GREEDY)
    engine.step()
    engine.close()
    engine.close()
    assert (engine.core.kv.n_used, engine.core.kv.n_cached, engine.core.kv.n_free_ids) == (
        0,
        0,
        engine.core.kv.n_seq_ids,
    )


# --- sampling on the real chain --------------------------------------------------------------------------------------


def test_a_strong_repetition_penalty_leaves_no_token_twice(engine: BatchInferenceEngine) -> None:
    params = SamplingParams(temperature=0, repetition_penalty=100, max_tokens=40, ignore_eos=True)
    for result in engine.generate(PROMPTS, params):
        assert len(set(result.tokens)) == len(result.tokens)


@pytest.mark.parametrize("penalty", ["presence_penalty", "frequency_penalty", "repetition_penalty"])
def test_each_penalty_changes_greedy_text(engine: BatchInferenceEngine, penalty: str) -> None:
    plain = engine.generate(PROMPTS, GREEDY)
    params = greedy(12, ignore_eos=True, **{penalty: 2.0})
    assert tokens_of(engine.generate(PROMPTS, params)) != tokens_of(plain)


def test_penalties_count_the_prompt(engine: BatchInferenceEngine) -> None:
    prompt = [1, *range(300, 330)]
    first = engine.generate([prompt], GREEDY)[0].tokens[0]
    params = SamplingParams(temperature=0, repetition_penalty=100, max_tokens=1, ignore_eos=True)
    assert engine.generate([prompt], params)[0].tokens == [first]
    repeated = [1, first, *prompt[2:]]
    chosen = engine.generate([repeated], params)[0].tokens[0]
    assert chosen not in repeated


def test_a_stop_token_ends_the_text_and_is_not_part_of_it(engine: BatchInferenceEngine) -> None:
    tokens = engine.generate(["Hello"], GREEDY)[0].tokens
    stop = next(token for token in tokens[3:] if token not in tokens[:3])
    result = engine.generate(["Hello"], SamplingParams(temperature=0, max_tokens=24, stop_token_ids=(stop,)))[0]
    assert result.finish_reason is FinishReason.STOP
    assert result.tokens == tokens[: tokens.index(stop)]


def test_min_tokens_keeps_stop_tokens_away_until_then(engine: BatchInferenceEngine) -> None:
    first = engine.generate(["Hello"], GREEDY)[0].tokens[0]
    params = SamplingParams(temperature=0, max_tokens=24, stop_token_ids=(first,), min_tokens=6)
    result = engine.generate(["Hello"], params)[0]
    assert len(result.tokens) >= 6
    assert first not in result.tokens


@pytest.fixture
def talkative(open_engine: OpenEngine, tmp_path: Path) -> BatchInferenceEngine:
    """A model that often ends its text."""
    return open_engine(tiny_models.llama(tmp_path / "ends.gguf", silent=()))


@pytest.fixture
def hot() -> list[dict[str, Any]]:
    sampling: dict[str, Any] = {"temperature": 2.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "max_tokens": 60}
    return [{**sampling, "seed": seed} for seed in range(16)]


def test_a_model_may_end_its_text_itself(talkative: BatchInferenceEngine, hot: list[dict[str, Any]]) -> None:
    results = talkative.generate(["Hello"] * 16, [SamplingParams(**its) for its in hot])
    ended = [result for result in results if result.finish_reason is FinishReason.STOP]
    assert ended
    assert all(len(result.tokens) < 60 for result in ended)


def test_with_ignore_eos_no_text_ends_early(talkative: BatchInferenceEngine, hot: list[dict[str, Any]]) -> None:
    results = talkative.generate(["Hello"] * 16, [SamplingParams(**its, ignore_eos=True) for its in hot])
    assert [(result.finish_reason, len(result.tokens)) for result in results] == [(FinishReason.LENGTH, 60)] * 16


def test_with_min_tokens_no_text_ends_before(talkative: BatchInferenceEngine, hot: list[dict[str, Any]]) -> None:
    results = talkative.generate(["Hello"] * 16, [SamplingParams(**its, min_tokens=20) for its in hot])
    assert all(len(result.tokens) >= 20 for result in results)
    assert any(result.finish_reason is FinishReason.STOP for result in results)


def test_map_gives_the_results_of_generate(tiny_llama: Path) -> None:
    prompts = [f"prompt {i} of many" for i in range(20)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    floats: dict[str, Any] = {
        "cache_type_k": "f32",
        "cache_type_v": "f32",
        "flash_attn": "off",
    }  # no text parts at a tie
    with BatchInferenceEngine(tiny_llama, n_ctx=512, n_parallel=4, n_threads=1, **floats) as engine:
        wanted = [result.tokens for result in engine.generate(prompts, params)]
        results = list(engine.map(prompts, params, ordered=True, priority=3))
        assert [result.completion.tokens for result in results] == wanted
        assert [result.prompt for result in results] == prompts
        assert not engine.has_work
