"""Log-probabilities are the model's own, regardless of sampling, batching, sharing and preemption."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest

from cppbatch import BatchInferenceEngine, Completion, SamplingParams
from cppbatch.llama import Batch, Context, Model
from tests.support import tiny_models
from tests.support.native_engines import PROMPTS
from tests.unit.test_logprobs import N_TOPS, assert_those_of, log_softmax

Rows = npt.NDArray[np.float64]

ROUNDED = 0.05  # keys are float16: in a batch of another shape sums round another way, and then so may these

MOST_SCORED = 64  # tokens of a prompt that a step gives logits for

SETTINGS: dict[str, Any] = {
    "spec": "off",  # the same tokens in the same runs
    "n_ctx": 1024, "n_batch": 256, "n_ubatch": 256, "n_threads": 1, "flash_attn": "off", "kv_layout": "unified",
}  # fmt: skip

LONG = [1, *range(290, 450)]


def read_alone(path: Path, tokens: list[int], n_prompt: int, *, run: int = 256) -> Rows:
    """What the model says after each of these tokens: those of the prompt in runs, the others one by one."""
    starts = [*range(0, n_prompt, run), *range(n_prompt, len(tokens))]
    rows = []
    sizes: dict[str, Any] = {name: SETTINGS[name] for name in ("n_ctx", "n_batch", "n_ubatch", "n_threads")}
    with Model(path) as model, Context(model, **sizes, flash_attn="off") as context:
        for start, stop in zip(starts, [*starts[1:], len(tokens)], strict=True):
            batch = Batch(context.n_batch)
            batch.add_run(np.array(tokens[start:stop], np.int32), start, 0, n_logits=stop - start)
            context.decode(batch)
            rows.append(context.logits(stop - start).copy())
    return log_softmax(np.concatenate(rows))


def tokens_of(engine: BatchInferenceEngine, prompt: str | list[int]) -> list[int]:
    return list(prompt) if isinstance(prompt, list) else engine.core.runtime.vocab.tokenize(prompt).tolist()


def assert_exact_alone(path: Path, prompt: str | list[int], params: SamplingParams) -> Completion:
    """Runs it alone, and the same tokens in the same runs in a separate context."""
    with BatchInferenceEngine(path, n_parallel=1, **SETTINGS) as engine:
        (result,) = engine.generate([prompt], params)
        start = tokens_of(engine, prompt)
    assert params.logprobs is not None
    assert len(result.logprobs) == len(result.tokens) + (len(start) if params.echo else 0)
    tokens = start + result.tokens
    rows = read_alone(path, tokens, len(start), run=MOST_SCORED if params.echo else 256)
    assert_those_of(rows, tokens, result.logprobs, n_top=params.logprobs)
    return result


@pytest.mark.parametrize("n_top", [0, 1, 5, 20])
def test_of_greedy_tokens_they_are_the_log_softmax_of_the_model(tiny_llama: Path, n_top: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=n_top)
    result = assert_exact_alone(tiny_llama, "Hello", params)
    if n_top:
        assert [entry.top[0][0] for entry in result.logprobs] == result.tokens
    with BatchInferenceEngine(tiny_llama, n_parallel=1, **SETTINGS) as engine:
        pieces = [[engine.core.runtime.vocab.piece(token) for token, _, _ in entry.top] for entry in result.logprobs]
        assert [[piece for _, piece, _ in entry.top] for entry in result.logprobs] == pieces
        assert [entry.piece for entry in result.logprobs] == [
            engine.core.runtime.vocab.piece(token) for token in result.tokens
        ]


CHANGED: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 3.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 1},
    "top_k": {"temperature": 50.0, "top_k": 2, "seed": 1},
    "top_p": {"temperature": 50.0, "top_k": 0, "top_p": 0.3, "seed": 1},
    "typical_p": {"temperature": 1.0, "typical_p": 0.5, "seed": 1},
    "mirostat": {"temperature": 1.0, "mirostat": 2, "seed": 1},
    "repetition_penalty": {"temperature": 0, "repetition_penalty": 100.0},
    "presence_penalty": {"temperature": 0, "presence_penalty": 2.0, "frequency_penalty": 2.0},
    "dry": {"temperature": 0, "dry_multiplier": 100.0, "dry_allowed_length": 0},
    "logit_bias": {"temperature": 0, "logit_bias": {300: 60.0}},
    "suppress_tokens": {"temperature": 0, "suppress_tokens": tuple(range(5, 300))},
    "a grammar": {"temperature": 0, "guided_regex": "[0-9]{24}"},
    "logits_processor": {"temperature": 0, "logits_processor": lambda tokens, row: -row},
}


@pytest.mark.parametrize("changed", CHANGED.values(), ids=CHANGED)
def test_logprobs_are_the_models_before_anything_changes_its_logits(tiny_llama: Path, changed: dict[str, Any]) -> None:
    prompt = LONG[:40]
    params = SamplingParams(max_tokens=24, ignore_eos=True, logprobs=3, **changed)
    result = assert_exact_alone(tiny_llama, prompt, params)
    likeliest = [entry.top[0][0] for entry in result.logprobs]
    assert result.tokens != likeliest  # so there was something to ignore


@pytest.mark.parametrize("n", [1, 2, 63, 64, 65, 66, 128, 129, 161])
def test_logprobs_of_a_prompt_are_exact_however_many_steps_it_takes(tiny_llama: Path, n: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=5, echo=True)
    assert_exact_alone(tiny_llama, LONG[:n], params)


@pytest.mark.parametrize("n_top", [0, 1, 20])
@pytest.mark.parametrize("prompt", [*PROMPTS, LONG], ids=lambda prompt: str(prompt)[:8])
def test_with_max_tokens_0_only_the_prompt_is_scored(tiny_llama: Path, prompt: str | list[int], n_top: int) -> None:
    result = assert_exact_alone(tiny_llama, prompt, SamplingParams(max_tokens=0, logprobs=n_top, echo=True))
    assert (result.tokens, result.finish_reason, result.usage.completion_tokens) == ([], "length", 0)
    assert len(result.logprobs) == result.usage.prompt_tokens


def params_of_a_crowd(*, echo: bool) -> list[SamplingParams]:
    """Half of them greedy, half sampled; each with a different number of top logprobs."""
    return [
        SamplingParams(
            temperature=i % 2, seed=i, max_tokens=20, ignore_eos=True, logprobs=N_TOPS[i % 4], echo=echo and i % 3 > 0
        )
        for i in range(len(PROMPTS) * 2)
    ]


def assert_those_of_the_model_alone(
    engine: BatchInferenceEngine,
    path: Path,
    prompts: Sequence[str | list[int]],
    params: list[SamplingParams],
    results: list[Completion],
) -> None:
    for prompt, its, result in zip(prompts, params, results, strict=True):
        start = tokens_of(engine, prompt)
        n = len(result.tokens) + (len(start) if its.echo else 0)
        assert len(result.logprobs) == (0 if its.logprobs is None else n)
        rows = read_alone(path, start + result.tokens, len(start))
        assert_those_of(rows, start + result.tokens, result.logprobs, n_top=its.logprobs or 0, within=ROUNDED)


@pytest.mark.each_value
@pytest.mark.parametrize("sampling", ["host", "backend"])
@pytest.mark.parametrize("kv_layout", ["unified", "per-sequence"])
def test_in_a_batch_each_request_gets_its_own_logprobs_and_the_number_it_asked_for(
    tiny_llama: Path, kv_layout: str, sampling: str
) -> None:
    params = params_of_a_crowd(echo=True)
    crowded: dict[str, Any] = {**SETTINGS, "kv_layout": kv_layout, "sampling": sampling, "n_parallel": 4}
    with BatchInferenceEngine(tiny_llama, **crowded) as engine:
        results = engine.generate(PROMPTS * 2, params)
        assert_those_of_the_model_alone(engine, tiny_llama, PROMPTS * 2, params, results)


@pytest.mark.parametrize("model", ["tiny_mamba", "tiny_swa", "tiny_hybrid"])
def test_every_kind_of_model_scores_its_prompts(request: pytest.FixtureRequest, model: str) -> None:
    path = request.getfixturevalue(model)
    params = [SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=2, echo=True)] * 3
    prompts = [LONG[:100], LONG[:70], LONG[40:140]]
    with BatchInferenceEngine(path, n_parallel=4, **SETTINGS) as engine:
        results = engine.generate(prompts, params)
        assert_those_of_the_model_alone(engine, path, prompts, params, results)


def test_a_warm_prefix_cache_changes_no_prompts_scores(tiny_llama: Path) -> None:
    plain = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    params = [SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=3, echo=True)] * 3
    with BatchInferenceEngine(tiny_llama, n_parallel=4, **SETTINGS) as engine:
        engine.generate([LONG], plain)
        assert engine.generate([LONG], plain)[0].usage.cached_tokens == len(LONG) - 1  # it is warm
        prompts = [LONG, LONG[:120], [*LONG[:90], 7, 8]]
        for _ in range(2):
            results = engine.generate(prompts, params)
            assert_those_of_the_model_alone(engine, tiny_llama, prompts, params, results)


def test_the_scores_of_a_completion_come_from_a_warm_prefix_too(tiny_llama: Path) -> None:
    params = [SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=3)]
    with BatchInferenceEngine(tiny_llama, n_parallel=4, **SETTINGS) as engine:
        cold, warm = (engine.generate([LONG], params) for _ in range(2))
        assert (cold[0].usage.cached_tokens, warm[0].usage.cached_tokens) == (0, len(LONG) - 1)
        assert_those_of_the_model_alone(engine, tiny_llama, [LONG], params, warm)


@pytest.mark.parametrize("swap_space", [64, 0], ids=["swapped", "recomputed"])
def test_preemption_in_a_tiny_cache_changes_no_scores(tiny_llama: Path, swap_space: int) -> None:
    params = [SamplingParams(temperature=0, max_tokens=100, ignore_eos=True, logprobs=2, echo=True)] * len(PROMPTS)
    tiny: dict[str, Any] = {**SETTINGS, "n_ctx": 256, "n_parallel": 6, "swap_space": swap_space}
    with BatchInferenceEngine(tiny_llama, **tiny) as engine:
        results = engine.generate(PROMPTS, params)
        stats = engine.stats()
        assert (stats.swaps > 0, stats.recomputes > 0) == (swap_space > 0, swap_space == 0)
        assert_those_of_the_model_alone(engine, tiny_llama, PROMPTS, params, results)


NO_BYTES = tuple(range(5, 261))  # of the tiny models: so that every piece is whole characters


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("prompt", ["Hello", " Hello ", "a\nb", LONG[:80]], ids=lambda prompt: str(prompt)[:8])
def test_at_its_offset_the_text_starts_with_the_token(tiny_llama: Path, prompt: str | list[int], echo: bool) -> None:
    params = SamplingParams(
        temperature=2, seed=1, max_tokens=30, ignore_eos=True, logprobs=0, echo=echo, suppress_tokens=NO_BYTES
    )
    with BatchInferenceEngine(tiny_llama, n_parallel=1, **SETTINGS) as engine:
        (result,) = engine.generate([prompt], params)
    entries = result.logprobs
    if echo and isinstance(prompt, str):
        assert (entries[0].piece, entries[0].text_offset) == (b"<s>", 0)  # added, so it is not in the text
        entries = entries[1:]
    ends = [entry.text_offset + len(entry.piece.decode()) for entry in entries]
    assert [entry.text_offset for entry in entries] == [0, *ends[:-1]]
    assert ends[-1] == len(result.text)
    for entry in entries:
        assert result.text.startswith(entry.piece.decode(), entry.text_offset)


def test_the_parts_of_a_character_have_its_offset(tiny_llama: Path) -> None:
    with BatchInferenceEngine(tiny_llama, n_parallel=1, **SETTINGS) as engine:
        (result,) = engine.generate(["é🙂!"], SamplingParams(max_tokens=0, logprobs=0, echo=True))
    assert [entry.text_offset for entry in result.logprobs] == [0, 0, 0, 1, 1, 1, 1, 2]
    assert b"".join(entry.piece for entry in result.logprobs[1:]).decode() == "é🙂!"


def test_control_tokens_of_a_prompt_keep_their_places(tiny_llama: Path) -> None:
    with BatchInferenceEngine(tiny_llama, n_parallel=1, **SETTINGS) as engine:
        (result,) = engine.generate(["<|im_start|>x\n"], SamplingParams(max_tokens=0, logprobs=0, echo=True))
    pieces = [(entry.piece, entry.text_offset) for entry in result.logprobs]
    assert pieces == [(b"<s>", 0), (b"<|im_start|>", 0), (b"x", 12), (b"\n", 13)]


def test_the_space_that_some_vocabularies_put_before_a_prompt_moves_no_offset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = gguf.GGUFWriter.add_add_space_prefix
    monkeypatch.setattr(gguf.GGUFWriter, "add_add_space_prefix", lambda writer, _: add(writer, True))
    path = tiny_models.llama(tmp_path / "space.gguf")
    params = SamplingParams(
        temperature=0, max_tokens=4, ignore_eos=True, logprobs=0, echo=True, suppress_tokens=NO_BYTES
    )
    with BatchInferenceEngine(path, n_parallel=1, **SETTINGS) as engine:
        (result,) = engine.generate(["Hi you"], params)
    assert [entry.piece for entry in result.logprobs[:5]] == [b"<s>", b" ", b"H", b"i", b" you"]
    for entry in result.logprobs[2:]:
        assert result.text.startswith(entry.piece.decode(), entry.text_offset)


def test_a_prompt_with_an_unpaired_surrogate_is_echoed_and_scored(tiny_llama: Path) -> None:
    params = SamplingParams(max_tokens=0, logprobs=0, echo=True)
    with BatchInferenceEngine(tiny_llama, n_parallel=1, **SETTINGS) as engine:
        (result,) = engine.generate(["a\ud800b"], params)
    assert [entry.piece for entry in result.logprobs] == [b"<s>", b"a", b"?", b"b"]
