"""Embedding requests through the step loop, over a fake model: which are computed when, and their results."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
import pytest

from cppbatch import BatchInferenceEngine, FinishReason, GenerationEvent
from cppbatch.engine.embeddings import check_dimensions, normalise_vectors, vector_of
from cppbatch.engine.request import Pair
from cppbatch.errors import CacheFull, DecodeFailed, GenerationFailed, InvalidRequest
from tests.support.fakes import BAD, context_of, drain, fake_engine, vector


def prompt(n: int, seed: int = 0) -> list[int]:
    return random.Random(seed * 1000 + n).choices(range(BAD), k=n)


def add(engine: BatchInferenceEngine, tokens: list[int], **options: Any) -> str:
    return engine.add_request(tokens, task="embed", **options)


def right(event: GenerationEvent, tokens: list[int]) -> bool:
    """Whether it is the one and only event of a request with these tokens."""
    assert event.usage
    same = event.embedding == vector(bytes(tokens)).tobytes()
    return same and event.finish_reason is FinishReason.STOP and event.usage.prompt_tokens == len(tokens)


@pytest.mark.parametrize("seed", range(8))
def test_each_request_gets_its_own_vector_in_one_event_and_nothing_is_left(seed: int) -> None:
    draw = random.Random(seed)
    n_batch, n_parallel = draw.choice([16, 40]), draw.choice([1, 3, 8])
    engine = fake_engine(n_batch=n_batch, n_parallel=n_parallel, n_ctx=40, pooling="mean")
    wanted: dict[str, list[int]] = {}
    told: dict[str, GenerationEvent] = {}
    for i in range(100):
        tokens = prompt(draw.randint(1, n_batch), i)
        wanted[add(engine, tokens, priority=draw.randint(-5, 5))] = tokens
        if i % 7 == 0:
            for event in engine.step():
                assert event.request_id not in told
                told[event.request_id] = event
            engine.core.kv.check()
            assert engine.core.kv.n_used == 0
    told |= {event.request_id: event for event in drain(engine)}
    assert told.keys() == wanted.keys()
    assert all(right(event, wanted[name]) for name, event in told.items())
    assert all(len(step) <= n_parallel and sum(step.values()) <= n_batch for step in context_of(engine).steps)


def test_a_step_is_filled_with_whole_prompts_in_order_of_rank() -> None:
    engine = fake_engine(n_batch=20, n_parallel=3, pooling="mean")
    late = [add(engine, prompt(n)) for n in (12, 9, 8, 1, 1)]
    first = add(engine, prompt(2), priority=-1)
    steps = [[event.request_id for event in engine.step()] for _ in range(3)]
    assert steps == [[first, late[0], late[3]], [late[1], late[2], late[4]], []]  # 9 and 8 had no room beside 2 and 12


def test_a_long_prompt_is_not_starved_by_short_ones() -> None:
    engine = fake_engine(n_batch=20, n_parallel=4, pooling="mean")
    add(engine, prompt(3))
    long = add(engine, prompt(20))
    assert long not in {event.request_id for event in engine.step()}
    for _ in range(5):
        add(engine, prompt(3))
    assert {event.request_id for event in engine.step()} == {long}


def test_a_prompt_of_a_whole_step_runs_and_one_token_more_is_refused_with_the_remedy() -> None:
    engine = fake_engine(n_batch=20, pooling="mean")
    name = add(engine, prompt(20))
    with pytest.raises(InvalidRequest, match=r"prompt: has 21 tokens.*holds only 20 \(raise n_batch \(-b\)"):
        add(engine, prompt(21))
    assert [event.request_id for event in drain(engine)] == [name]


def test_a_prompt_longer_than_the_models_context_is_refused_with_its_limit() -> None:
    with pytest.raises(InvalidRequest, match="has 11 tokens, but the limit of this model is 10"):
        add(fake_engine(n_batch=20, n_ctx_train=10, pooling="mean"), prompt(11))


def test_one_that_is_cancelled_or_waits_too_long_ends_without_a_vector_and_alone() -> None:
    engine = fake_engine(n_batch=20, n_parallel=1, pooling="mean")
    tokens = [prompt(5, i) for i in range(4)]
    names = [add(engine, tokens[0]), add(engine, tokens[1])]
    names += [add(engine, tokens[2], timeout=0.01), add(engine, tokens[3], queue_timeout=0.01)]
    assert engine.cancel(names[1])
    time.sleep(0.02)
    events = {event.request_id: event for event in drain(engine)}
    reasons = [events[name].finish_reason for name in names]
    assert reasons == [FinishReason.STOP, FinishReason.CANCELLED, FinishReason.TIMEOUT, FinishReason.TIMEOUT]
    assert [events[name].embedding is None for name in names] == [False, True, True, True]


@pytest.mark.parametrize("error", [DecodeFailed(-3, "compute failed"), CacheFull("no free KV cells")])
def test_a_step_that_fails_ends_its_own_sequences_and_no_others(error: Exception) -> None:
    engine = fake_engine(n_batch=20, n_parallel=2, pooling="mean")
    context_of(engine).fail_at[1] = error  # type: ignore[assignment]
    tokens = [prompt(5, i) for i in range(4)]
    names = [add(engine, its) for its in tokens]
    events = {event.request_id: event for event in drain(engine)}
    assert [events[name].finish_reason for name in names[:2]] == [FinishReason.ERROR] * 2
    assert all(right(events[name], its) for name, its in zip(names[2:], tokens[2:], strict=True))
    engine.core.kv.check()


def test_an_interrupted_step_is_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = fake_engine(n_batch=20, n_parallel=2, pooling="mean")
    tokens = [prompt(5, i) for i in range(4)]
    names = [add(engine, its) for its in tokens]

    def interrupt(seq_id: int) -> object:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(context_of(engine), "embedding", interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    events = {event.request_id: event for event in drain(engine)}
    assert all(right(events[name], its) for name, its in zip(names, tokens, strict=True))


def test_a_vector_with_nan_is_an_error_and_not_an_answer() -> None:
    engine = fake_engine(n_batch=20, pooling="mean")
    add(engine, [1, BAD, 2])
    (event,) = drain(engine)
    assert event.finish_reason is FinishReason.ERROR
    assert event.embedding is None
    assert event.error
    assert "NaN" in event.error
    with pytest.raises(GenerationFailed, match=r"texts\[1\] has no vector: .*NaN"):
        engine.embed([[1, 2], [1, BAD]])


def test_embed_returns_vectors_in_the_order_of_the_texts() -> None:
    engine = fake_engine(n_batch=20, n_parallel=4, pooling="mean")
    texts = [prompt(random.Random(i).randint(1, 20), i) for i in range(100)]
    expected = np.stack([vector(bytes(tokens)) for tokens in texts])
    assert np.array_equal(engine.embed(texts, normalise=False), expected)
    assert np.array_equal(engine.embed(texts, normalise=False, dimensions=2), expected[:, :2])
    assert np.allclose(engine.embed(texts), expected / np.linalg.norm(expected, axis=1, keepdims=True), atol=1e-6)
    assert engine.embed([]).shape == (0, 3)
    stats = engine.stats()
    assert stats.prompt_tokens == 3 * sum(map(len, texts))
    assert (stats.finished, stats.generated_tokens, stats.kv_cells_used) == ({"stop": 300}, 0, 0)


def test_embed_names_the_text_at_fault_before_anything_runs() -> None:
    engine = fake_engine(n_batch=20, pooling="mean")
    with pytest.raises(InvalidRequest, match=r"texts\[1\]: prompt: is empty"):
        engine.embed([[1], []])
    with pytest.raises(InvalidRequest, match="dimensions: is 4; it must be from 1 to 3"):
        engine.embed([[1]], dimensions=4)
    assert engine.stats().steps == 0


def test_scores_of_a_reranker_are_not_normalised() -> None:
    engine = fake_engine(n_batch=20, pooling="rank")
    assert np.array_equal(engine.embed([[3, 4]]), vector(bytes([3, 4]))[None])


def test_a_task_that_the_model_does_not_support_is_refused_with_the_reason() -> None:
    with pytest.raises(InvalidRequest, match=r"task: fake generates text.*--pooling mean"):
        add(fake_engine(), [1])
    with pytest.raises(
        InvalidRequest, match=r"task: fake runs as an embedding model \(pooling \(--pooling\) is 'cls'\) and does not"
    ):
        fake_engine(pooling="cls").add_request([1])
    with pytest.raises(InvalidRequest, match="task: fake runs as a reranker and does not generate text"):
        fake_engine(pooling="rank").add_request([1])
    with pytest.raises(InvalidRequest, match="prompt: is a pair of texts, which requires a reranker"):
        fake_engine(pooling="mean").add_request(Pair("a", "b"), task="embed")
    with pytest.raises(InvalidRequest, match=r"prompt: is .*it must be a string or a list of token ids"):
        fake_engine().add_request(Pair("a", "b"))
    with pytest.raises(InvalidRequest, match="task: is 'sing'; it must be one of generate, embed"):
        fake_engine().add_request([1], task="sing")  # type: ignore[arg-type]


def test_normalised_vectors_have_length_one_after_they_were_cut() -> None:
    vectors = np.array([[3, 4, 12], [0, 0, 1], [0, 0, 0], [1e30, 1e30, 0]], np.float32)
    whole, cut = normalise_vectors(vectors), normalise_vectors(vectors, 2)
    assert whole.dtype == cut.dtype == np.float32
    assert np.allclose(whole[0], [3 / 13, 4 / 13, 12 / 13])
    assert np.allclose(cut, np.array([[0.6, 0.8], [0, 0], [0, 0], [0.5**0.5, 0.5**0.5]]))
    assert np.allclose(normalise_vectors(vectors[0], 2), [0.6, 0.8])
    assert vectors[0, 0] == 3


@pytest.mark.parametrize("dimensions", [0, -1, 4])
def test_dimensions_out_of_range_are_refused(dimensions: int) -> None:
    with pytest.raises(InvalidRequest, match=f"dimensions: is {dimensions}.*1 to 3"):
        normalise_vectors(np.ones((2, 3), np.float32), dimensions)
    check_dimensions(None, 3)


def test_an_embedding_is_float32_little_endian() -> None:
    assert vector_of(b"\x00\x00\x80\x3f\x00\x00\x00\xc0").tolist() == [1.0, -2.0]
