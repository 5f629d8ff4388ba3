"""Embedding models and rerankers: vectors and scores are those of llama.cpp for each text alone."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
import pytest

from cppbatch import BatchInferenceEngine, EngineConfig, SamplingParams
from cppbatch.engine.embeddings import vector_of
from cppbatch.engine.request import Pair
from cppbatch.errors import ConfigError, InvalidRequest, LlamaError, ModelError, OutOfRange
from cppbatch.llama import Batch, Context, Model
from tests.support import tiny_models

EXACT: dict[str, Any] = {"n_threads": 1, "flash_attn": "off", "cache_type_k": "f32", "cache_type_v": "f32"}
TEXTS = [f"{'the cat said that it was ' * (1 + 2 * (i % 4))}number {i}" for i in range(16)]
POOLING_TYPE = {"none": 0, "mean": 1, "cls": 2, "last": 3, "rank": 4}

Rows = np.ndarray[Any, np.dtype[np.float32]]


@contextmanager
def opened(model: Path, **settings: Any) -> Iterator[BatchInferenceEngine]:
    with BatchInferenceEngine(model, **{"n_ctx": 2048, **EXACT, **settings}) as engine:
        yield engine
        engine.core.kv.check()
        assert engine.core.kv.n_used == 0


def alone(model: Path, pooling: str, prompts: list[list[int]], n: int) -> Rows:
    """Vectors of one sequence after the other, by llama.cpp's own functions only: float32[len(prompts), n]; without
    pooling those of all tokens: float32[n_tokens, n]."""
    weights = llama_cpp.llama_model_load_from_file(str(model).encode(), llama_cpp.llama_model_default_params())
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = 2048
    params.n_threads = params.n_threads_batch = 1
    params.embeddings, params.pooling_type = True, POOLING_TYPE[pooling]
    params.flash_attn_type, params.type_k, params.type_v = 0, 0, 0
    context = llama_cpp.llama_init_from_model(weights, params)
    rows = []
    try:
        for tokens in prompts:
            array = (ctypes.c_int32 * len(tokens))(*tokens)
            assert llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(array, len(tokens))) == 0
            if pooling == "none":
                found = np.ctypeslib.as_array(llama_cpp.llama_get_embeddings(context), (len(tokens), n))
                rows += list(found.copy())
            else:
                rows.append(np.ctypeslib.as_array(llama_cpp.llama_get_embeddings_seq(context, 0), (n,)).copy())
            llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
    finally:
        llama_cpp.llama_free(context)
        llama_cpp.llama_model_free(weights)
    return np.stack(rows)


def tokens_of(model: Path, texts: list[str]) -> list[list[int]]:
    with Model(model) as opened_model:
        return [opened_model.vocab.tokenize(text).tolist() for text in texts]


def same(a: Rows, b: Rows, difference: float = 1e-5) -> bool:
    """Equal but for the order of sums."""
    return a.shape == b.shape and bool(np.allclose(a, b, rtol=0, atol=difference))


GELU = 2e-3
"""What BERT and Gemma may differ by: on a CPU, ggml looks GELU up in a table of 16-bit floats, so a last bit counts.
4e-4 and a little over 5e-4 were seen on two CPUs; the vector of a neighbouring token differs by 0.6."""

KINDS = [
    ("rotary", None, 1e-5), ("encoder", None, GELU), ("encoder", "cls", GELU), ("llama", "last", 1e-5),
    ("llama", "mean", 1e-5), ("swa", "mean", GELU), ("mamba", "last", 1e-5), ("hybrid", "mean", 1e-5),
]  # fmt: skip


@pytest.fixture(scope="module")
def tiny_rotary(tiny_folder: Path) -> Path:
    return tiny_models.encoder_only(tiny_folder / "tiny-rotary.gguf", rotary=True)


@pytest.mark.parametrize(("kind", "pooling", "difference"), KINDS, ids=str)
def test_vectors_of_a_batch_are_those_that_llama_cpp_gives_for_each_text_alone(
    kind: str, pooling: Any, difference: float, request: pytest.FixtureRequest
) -> None:
    model = request.getfixturevalue(f"tiny_{kind}")
    with opened(model, pooling=pooling) as engine:
        together = engine.embed(TEXTS, normalise=False)
        assert engine.stats().steps == 1
        one_by_one = np.concatenate([engine.embed([text], normalise=False) for text in TEXTS])
        used = engine.info.pooling
        assert engine.info.n_embd == together.shape[1] == tiny_models.N_EMBD
    assert used
    assert used == (pooling or "mean")
    assert same(together, one_by_one, difference)
    assert same(one_by_one, alone(model, used, tokens_of(model, TEXTS), tiny_models.N_EMBD))
    assert len(np.unique(together.round(3), axis=0)) == len(TEXTS)


@pytest.mark.parametrize(("kind", "difference"), [("encoder", GELU), ("rotary", 1e-5), ("llama", 1e-5)])
def test_without_pooling_every_token_has_the_vector_that_llama_cpp_gives_it(
    kind: str, difference: float, request: pytest.FixtureRequest
) -> None:
    model = request.getfixturevalue(f"tiny_{kind}")
    with opened(model, pooling="none") as engine:
        ids = [engine.add_request(text, task="embed") for text in TEXTS]
        found: dict[str, bytes] = {}
        while engine.has_work:
            found |= {event.request_id: event.embedding for event in engine.step() if event.embedding is not None}
        with pytest.raises(InvalidRequest, match="pooling: is none"):
            engine.embed(TEXTS)
    together = np.concatenate([vector_of(found[id_]).reshape(-1, tiny_models.N_EMBD) for id_ in ids])
    prompts = tokens_of(model, TEXTS)
    assert len(together) == sum(map(len, prompts))
    assert same(together, alone(model, "none", prompts, tiny_models.N_EMBD), difference)


def test_a_model_that_is_pooled_by_its_file_needs_no_option(tmp_path: Path) -> None:
    for pooling, name in ((gguf.PoolingType.CLS, "cls"), (gguf.PoolingType.LAST, "last")):
        model = tiny_models.encoder_only(tmp_path / f"{name}.gguf", pooling=pooling)
        with opened(model) as engine:
            assert engine.info.pooling == name
            assert same(
                engine.embed(TEXTS[:4], normalise=False),
                alone(model, name, tokens_of(model, TEXTS[:4]), tiny_models.N_EMBD),
                GELU,
            )


def test_a_generating_model_reports_that_it_returns_text(tiny_llama: Path) -> None:
    with opened(tiny_llama) as engine:
        assert engine.info.pooling is None
        assert engine.generate(["the cat"], SamplingParams(max_tokens=3))[0].usage.completion_tokens == 3


def test_a_hundred_texts_are_all_answered_in_their_order(tiny_encoder: Path) -> None:
    texts = [f"text {i} {'of many words ' * (i % 9)}" for i in range(100)]
    with opened(tiny_encoder, n_batch=256) as engine:
        vectors = engine.embed(texts)
        assert engine.stats().steps > 5
        assert np.array_equal(vectors[[3, 50, 99]].round(4), engine.embed([texts[i] for i in (3, 50, 99)]).round(4))
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)


def test_a_text_that_is_too_long_is_refused_and_the_others_are_embedded(tmp_path: Path) -> None:
    model = tiny_models.encoder_only(tmp_path / "short.gguf", n_ctx_train=64)
    with opened(model) as engine:
        with pytest.raises(InvalidRequest, match="prompt: has 65 tokens, but the limit of this model is 64"):
            engine.add_request(list(range(5, 70)), task="embed")
        assert engine.embed([list(range(5, 69)), "abc"]).shape == (2, tiny_models.N_EMBD)
    with (
        opened(model, n_batch=32) as engine,
        pytest.raises(
            InvalidRequest, match=r"texts\[1\]: prompt: has 33 tokens.*whole, holds only 32 \(raise n_batch \(-b\)"
        ),
    ):
        engine.embed(["abc", list(range(5, 38))])


def test_a_position_that_the_model_has_no_weights_for_never_reaches_llama_cpp(tmp_path: Path) -> None:
    with (
        Model(tiny_models.encoder_only(tmp_path / "short.gguf", n_ctx_train=64)) as model,
        Context(model, n_ctx=256, n_threads=1, pooling="mean") as context,
    ):
        batch = Batch(256)
        batch.add_run(np.arange(5, 70, dtype=np.int32), 0, 0, n_logits=65)
        with pytest.raises(OutOfRange, match="position 64; the limit is 63"):
            context.decode(batch)
        with pytest.raises(LlamaError, match="no vector for sequence 0"):
            context.embedding(0)


# --- rerankers --------------------------------------------------------------------------------------------------------

PAIRS = [Pair("what is a cat", text) for text in TEXTS]


def test_a_reranker_scores_pairs_as_llama_cpp_does(tiny_reranker: Path) -> None:
    with opened(tiny_reranker) as engine:
        info = engine.info
        scores = engine.embed(PAIRS)
        assert (info.pooling, info.n_embd, info.rerank_template, info.labels) == ("rank", 1, None, ["0"])
    queries = tokens_of(tiny_reranker, [pair.query for pair in PAIRS])
    documents = tokens_of(tiny_reranker, [pair.document for pair in PAIRS])
    cls, sep = 2, 3
    prompts = [query + document[1:] for query, document in zip(queries, documents, strict=True)]
    assert all((prompt[0], prompt[-1], prompt.count(sep)) == (cls, sep, 2) for prompt in prompts)
    assert same(scores, alone(tiny_reranker, "rank", prompts, 1), GELU)
    assert np.ptp(scores) > 0.1


def test_a_classifier_gives_all_its_scores_for_one_text(tmp_path: Path) -> None:
    model = tiny_models.reranker(tmp_path / "three.gguf", n_scores=3)
    with opened(model) as engine:
        assert (engine.info.n_embd, engine.info.labels) == (3, ["0", "1", "2"])
        scores = engine.embed(TEXTS)
    assert same(scores, alone(model, "rank", tokens_of(model, TEXTS), 3), GELU)


def test_a_reranker_with_a_template_reads_that(tmp_path: Path) -> None:
    model = tiny_models.reranker(tmp_path / "t.gguf", rerank_template="q: {query} d: {document}?")
    with opened(model) as engine:
        scores = engine.embed([Pair("a {document} b", "c {query}")])
    with Model(model) as opened_model:
        tokens = opened_model.vocab.tokenize("q: a {document} b d: c {query}?", add_special=False).tolist()
    assert same(scores, alone(model, "rank", [tokens], 1))


def test_a_pair_is_marked_as_the_vocabulary_says(tiny_llama: Path) -> None:
    with Model(tiny_llama) as model:
        vocab = model.vocab
        plain = [vocab.tokenize(text, add_special=False).tolist() for text in ("the cat", "a dog")]
        assert vocab.tokenize_pair("the cat", "a dog").tolist() == [vocab.bos, *plain[0], *plain[1]]
        assert vocab.eos not in vocab.tokenize_pair("the </s>", "</s>")


def test_rank_without_a_classification_head_is_refused(tiny_llama: Path, tiny_encoder: Path) -> None:
    for model in (tiny_llama, tiny_encoder):
        with pytest.raises(ModelError, match="no classification head, so it is not a reranker"):
            BatchInferenceEngine(model, n_ctx=256, pooling="rank", **EXACT)


def test_a_reranker_without_a_pooling_type_in_its_file_works_with_pooling_rank(
    tmp_path: Path, tiny_reranker: Path
) -> None:
    model = tiny_models.reranker(tmp_path / "unsaid.gguf", pooling=None)
    with opened(model, pooling="rank") as said, opened(tiny_reranker) as engine:
        assert np.array_equal(said.embed(PAIRS), engine.embed(PAIRS))


@pytest.mark.parametrize("write", [tiny_models.diffusion, tiny_models.encoder_decoder])
@pytest.mark.parametrize("pooling", [None, "mean"])
def test_models_of_other_kinds_are_refused_plainly(write: Callable[[Path], Path], pooling: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is an encoder-decoder or diffusion model, which is not supported"):
        BatchInferenceEngine(write(tmp_path / "m.gguf"), n_ctx=256, pooling=pooling, **EXACT)


def test_an_encoder_that_does_not_say_how_it_is_pooled_asks_for_it(tmp_path: Path) -> None:
    model = tiny_models.encoder_only(tmp_path / "unsaid.gguf", pooling=None)
    with pytest.raises(ModelError, match=r"does not specify the pooling.*pooling \(--pooling\) to mean, cls or last"):
        BatchInferenceEngine(model, n_ctx=256, **EXACT)
    with opened(model, pooling="cls") as engine:
        assert engine.info.pooling == "cls"


def test_an_unknown_pooling_type_is_refused() -> None:
    with pytest.raises(ConfigError, match="'max'; it must be one of none, mean, cls, last, rank"):
        EngineConfig(model_path="", pooling="max")  # type: ignore[arg-type]


def test_a_context_that_could_not_write_text_is_refused(tiny_encoder: Path) -> None:
    with Model(tiny_encoder) as model, pytest.raises(LlamaError, match="cannot generate text, only embeddings"):
        Context(model, n_ctx=256, n_threads=1)


# --- the default model ------------------------------------------------------------------------------------------------
