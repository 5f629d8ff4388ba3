"""Context shift over llama.cpp's memory. In a model of one layer it is exact, so it is compared with computing again.

There the keys and values of a token depend only on the token and its position; with more layers they contain something
of all tokens before it, also of dropped ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cppbatch import BatchInferenceEngine, Completion, SamplingParams
from cppbatch.errors import LlamaError, OutOfRange
from cppbatch.llama import Context, Model
from cppbatch.models.synthetic import LlamaShape
from tests.support import tiny_models
from tests.support.contexts import decode
from tests.support.http_client import http_of
from tests.support.native_engines import OpenEngine

N_CTX = 256
TOKENS = np.arange(10, 50, dtype=np.int32)
KEPT, FROM = 5, 20
LAYOUTS: dict[str, dict[str, Any]] = {"unified": {"kv_unified": True}, "streams": {"kv_unified": False, "n_ctx": 1024}}
ENGINES: dict[str, dict[str, Any]] = {
    "unified": {"kv_layout": "unified", "n_ctx": N_CTX},
    "per-sequence": {"kv_layout": "per-sequence", "n_ctx": 4 * N_CTX},
}
GREEDY = SamplingParams(temperature=0, max_tokens=280, ignore_eos=True)


@pytest.fixture(scope="module")
def one_layer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("one") / "one-layer.gguf"
    return tiny_models.llama(path, shape=LlamaShape(n_layer=1))


@pytest.fixture(scope="module")
def one_layer_model(one_layer: Path) -> Iterator[Model]:
    with Model(one_layer) as model:
        yield model


@pytest.fixture(params=LAYOUTS)
def shifting(request: pytest.FixtureRequest, one_layer_model: Model, make_context: Callable[..., Context]) -> Context:
    return make_context(one_layer_model, type_k="f32", type_v="f32", **LAYOUTS[request.param])


def test_shifted_cells_are_those_of_the_tokens_at_their_new_positions(shifting: Context) -> None:
    left = np.concatenate([TOKENS[:KEPT], TOKENS[FROM:]])
    expected = decode(shifting, [*left, 7], seq_id=1)
    decode(shifting, TOKENS)
    neighbour = decode(shifting, TOKENS, seq_id=2)
    assert shifting.can_shift
    assert shifting.remove(0, KEPT, FROM)
    shifting.shift(0, FROM, KEPT - FROM)
    assert shifting.last_position(0) == len(left) - 1
    np.testing.assert_allclose(decode(shifting, [7], 0, len(left)), expected, atol=1e-3)
    shifting.remove(2, len(TOKENS) - 1)
    np.testing.assert_allclose(decode(shifting, TOKENS[-1:], 2, len(TOKENS) - 1), neighbour, atol=1e-3)


def test_a_shifted_sequence_is_saved_only_after_its_keys_were_rotated(shifting: Context) -> None:
    decode(shifting, TOKENS)
    shifting.remove(0, KEPT, FROM)
    shifting.shift(0, FROM, KEPT - FROM)
    with pytest.raises(LlamaError, match="was shifted"):
        shifting.save_sequence(0)
    n = len(TOKENS) - FROM + KEPT
    decode(shifting, [7], 0, n)
    shifting.restore_sequence(1, shifting.save_sequence(0))
    expected = decode(shifting, [8], 0, n + 1)
    np.testing.assert_allclose(decode(shifting, [8], 1, n + 1), expected, atol=1e-3)


def test_positions_below_0_are_refused_before_they_reach_c(shifting: Context) -> None:
    decode(shifting, TOKENS)
    with pytest.raises(OutOfRange, match="position 3 was to be shifted by -4"):
        shifting.shift(0, 3, -4)


@pytest.mark.parametrize("kind", ["tiny_mamba", "tiny_swa", "tiny_hybrid"])
def test_memory_that_is_not_all_cells_is_never_shifted(
    request: pytest.FixtureRequest, kind: str, make_context: Callable[..., Context]
) -> None:
    with Model(request.getfixturevalue(kind)) as model:
        context = make_context(model)
        decode(context, TOKENS)
        assert not context.can_shift
        with pytest.raises(OutOfRange, match="cannot be shifted"):
            context.shift(0, FROM, -1)
        context.close()


def texts(engine: BatchInferenceEngine) -> list[Completion]:
    """Long texts, some of which share their prompts' cells."""
    prompts = [[1, *range(10, 90)], [1, *range(10, 90), 7], [1, 20, 30], [1, *range(10, 240)]]
    done = engine.generate(prompts, GREEDY)
    assert [len(completion.tokens) for completion in done] == [280] * 4
    assert all(completion.usage.context_shifts for completion in done)
    return done


@pytest.mark.parametrize("layout", ENGINES)
def test_a_text_continues_in_shifted_cells_as_in_recomputed_ones(
    one_layer: Path, open_engine: OpenEngine, layout: str
) -> None:
    """With drafts, and in the unified layout with sequences that take turns in the cells of one."""
    settings = {**ENGINES[layout], "context_shift": True, "cache_type_k": "f32", "cache_type_v": "f32", "n_keep": 4}
    engine = open_engine(one_layer, **settings)
    shifted = [completion.tokens for completion in texts(engine)]
    again = open_engine(one_layer, **settings, spec="off", prefix_cache=False)
    again.core.kv._shifts_cells = False
    assert shifted == [completion.tokens for completion in texts(again)]
    assert engine.stats().context_shifts == again.stats().context_shifts > 4


@pytest.mark.each_value
@pytest.mark.parametrize("kind", ["tiny_llama", "tiny_mamba", "tiny_swa", "tiny_hybrid"])
@pytest.mark.parametrize("layout", ENGINES)
def test_every_kind_of_memory_continues(
    request: pytest.FixtureRequest, open_engine: OpenEngine, kind: str, layout: str
) -> None:
    texts(open_engine(request.getfixturevalue(kind), **ENGINES[layout], context_shift=True))


async def test_llama_servers_fields_and_answer(tiny_llama: Path) -> None:
    settings: dict[str, Any] = {"n_ctx": N_CTX, "n_parallel": 1, "n_threads": 1, "context_shift": True, "n_keep": 2}
    async with http_of(tiny_llama, **settings) as http:
        body = {"prompt": "Hello", "n_predict": 300, "ignore_eos": True, "n_keep": 3, "n_discard": 20}
        async with http.post("/completion", json=body) as answer:
            done = await answer.json()
        assert (done["tokens_predicted"], done["truncated"], done["stop_type"]) == (300, True, "limit")
        assert (done["generation_settings"]["n_keep"], done["generation_settings"]["n_discard"]) == (3, 20)
        async with http.post("/completion", json={**body, "n_keep": -2}) as answer:
            assert (answer.status, (await answer.json())["error"]["param"]) == (400, "n_keep")
        async with http.get("/props") as answer:
            props = await answer.json()
            assert (props["default_generation_settings"]["params"]["n_keep"], props["n_keep"]) == (2, 2)
        async with http.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 300, "ignore_eos": True}) as one:
            assert (await one.json())["usage"]["completion_tokens"] == 300
