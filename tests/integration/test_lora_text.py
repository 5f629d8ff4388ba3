"""A request's text is that of its adapters alone, regardless of other requests and of restarts of the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cppbatch import BatchInferenceEngine, InvalidRequest
from cppbatch.config import KvLayout
from tests.support.http_client import http_of
from tests.support.lora_texts import (
    FLOATS,
    GREEDY,
    LORAS,
    N_NEW,
    OF,
    PROMPTS,
    STORY,
    Files,
    Lora,
    alone,
    chosen,
    make_adapters,
    open_engine,
    texts_apart,
    texts_together,
)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return make_adapters(tmp_path_factory.mktemp("lora"))


@pytest.fixture(scope="module")
def expected(tiny_llama: Path, adapters: Files) -> list[str]:
    return texts_apart(tiny_llama, adapters)


@pytest.mark.parametrize("layout", ["unified", "per-sequence"])
def test_16_of_16_texts_mixed_equal_those_of_engines_with_these_adapters_only(
    tiny_llama: Path, adapters: Files, expected: list[str], layout: KvLayout
) -> None:
    assert len(set(expected)) == len(expected)
    with open_engine(tiny_llama, adapters, kv_layout=layout) as engine:
        assert texts_together(engine) == expected
        assert texts_together(engine) == expected  # from the prefix cache
        assert engine.stats().prefix_hits >= 8


@pytest.mark.parametrize("swap_space", [1024, 0])
def test_texts_stay_right_when_sequences_lose_their_cells(
    tiny_llama: Path, adapters: Files, expected: list[str], swap_space: int
) -> None:
    with open_engine(tiny_llama, adapters, n_ctx=256, n_parallel=8, swap_space=swap_space) as engine:
        assert texts_together(engine) == expected
        stats = engine.stats()
    assert (stats.swaps if swap_space else stats.recomputes) > 0


@pytest.mark.parametrize("layout", ["unified", "per-sequence"])
def test_one_prompt_under_different_adapters_never_gets_the_prefix_of_another(
    tiny_llama: Path, adapters: Files, layout: KvLayout
) -> None:
    prompt = STORY * 3
    wanted = {str(lora): alone(tiny_llama, adapters, lora, [prompt])[0] for lora in LORAS}
    assert len(set(wanted.values())) == len(LORAS)
    with open_engine(tiny_llama, adapters, kv_layout=layout) as engine:
        for i in range(2):
            for lora in LORAS:
                results = engine.generate([prompt] * 2, GREEDY, lora=lora)
                assert [result.text for result in results] == [wanted[str(lora)]] * 2
                assert i == 0 or all(result.usage.cached_tokens > 0 for result in results)


def test_a_request_without_lora_gets_the_adapters_with_their_startup_scales(
    tiny_llama: Path, adapters: Files, expected: list[str]
) -> None:
    at_start: Lora = {"x": 1, "y": 0.5}
    with BatchInferenceEngine(tiny_llama, n_ctx=2048, lora=chosen(adapters, at_start), **FLOATS) as engine:
        assert [(each.name, each.scale) for each in engine.info.adapters] == [("x", 1), ("y", 0.5)]
        i = OF.index(at_start)
        by_number: Lora = {1: 0.5, 0: 1}
        for lora in (None, at_start, by_number):
            assert engine.generate([PROMPTS[i]], GREEDY, lora=lora)[0].text == expected[i]
        assert engine.generate([PROMPTS[2]], GREEDY, lora={"x": 0, "y": 1e-50})[0].text == expected[OF.index({})]


@pytest.mark.parametrize(
    ("lora", "reason"),
    [
        ({"z": 1}, r"adapter 'z' not found; available: 'x' \(0\), 'y' \(1\)"),
        ({"X": 1}, "adapter 'X' not found"),
        ({2: 1}, "adapter 2 not found"),
        ({-1: 1}, "key -1"),
        ({2**64: 1}, "key 18446744073709551616"),
        ({True: 1}, "key True"),
        ({0.0: 1}, "key 0.0"),
        ({"x": 1, 0: 1}, "adapter 'x' twice"),
        ({"x": float("nan")}, "is nan for 'x'"),
        ({"x": float("inf")}, "is inf for 'x'; it must be from -1000 to 1000"),
        ({"x": -1001}, "is -1001 for 'x'"),
        ({"x": "1"}, "is '1' for 'x'"),
        ({"x": True}, "is True for 'x'"),
        ({"x": None}, "is None for 'x'"),
        (["x"], "must be an object that maps names to scales"),
        ("x", "must be an object that maps names to scales"),
    ],
)
def test_invalid_adapters_are_refused(tiny_llama: Path, adapters: Files, lora: Any, reason: str) -> None:
    with open_engine(tiny_llama, adapters, n_ctx=256, n_parallel=1) as engine:
        with pytest.raises(InvalidRequest, match=reason) as raised:
            engine.add_request("a", lora=lora)
        assert raised.value.field == "lora"
        assert not engine.has_work


def test_an_adapter_is_refused_by_an_engine_without_adapters(tiny_llama: Path) -> None:
    with BatchInferenceEngine(tiny_llama, n_ctx=256, n_threads=1) as engine:
        with pytest.raises(InvalidRequest, match=r"adapter 'x' not found; available: none"):
            engine.add_request("a", lora={"x": 1})
        assert engine.generate(["a"], GREEDY, lora={})[0].text


async def test_over_http_adapters_are_chosen_by_name_or_as_llama_server_has_it(
    tiny_llama: Path, adapters: Files, expected: list[str]
) -> None:
    settings: dict[str, Any] = {"n_ctx": 4096, "n_parallel": 4, "lora": chosen(adapters, {"x": 1, "y": 0.5}), **FLOATS}
    fields: list[dict[str, Any]] = [
        {}, {"lora": None}, {"lora": {"x": 1, "y": 0.5}}, {"lora": [{"id": 0, "scale": 1}, {"id": 1, "scale": 0.5}]},
        {"lora": {}}, {"lora": []}, {"lora": [{"id": 1, "scale": 0}]},
    ]  # fmt: skip
    bad = {
        '{"z": 1}': "lora",
        '{"x": 1e9}': "lora",
        '{"x": null}': "lora",
        '"x"': "lora",
        '[{"id": 2, "scale": 1}]': "lora",
        '[{"id": 0, "scale": 1e9}]': "lora",
        '[{"id": -1, "scale": 1}]': "lora[0].id",
        '[{"id": 0}]': "lora[0]",
        '[{"id": 0, "scale": "1"}]': "lora[0].scale",
        '[{"id": 1, "scale": 1}, {"id": 1, "scale": 2}]': "lora[1].id",
    }
    async with http_of(tiny_llama, **settings) as http:
        for i, more in enumerate(fields):
            prompt = OF.index({"x": 1, "y": 0.5} if i < 4 else {})
            body = {"prompt": PROMPTS[prompt], "temperature": 0, "max_tokens": N_NEW, "ignore_eos": True, **more}
            answer = await (await http.post("/v1/completions", json=body)).json()
            assert answer["choices"][0]["text"] == expected[prompt]
        for text, field in bad.items():
            answer = await http.post("/v1/completions", data=f'{{"prompt": "a", "lora": {text}}}')
            assert answer.status == 400, text
            error = (await answer.json())["error"]
            assert error["param"].startswith(field), (text, error)
