"""A request's text is that of its adapters alone, whatever others run beside it, and whatever becomes of the engine."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from cppbatch import BatchInferenceEngine, FinishReason, GenerationRequest, InvalidRequest, SamplingParams
from cppbatch.cluster import supervisor
from cppbatch.cluster.engine_process import EngineProcess
from cppbatch.cluster.local_engine import LocalEngine
from cppbatch.config import KvLayout
from cppbatch.models.synthetic import LlamaShape, write_lora
from cppbatch.server.app import create_app

Lora = dict[str | int, float]

FLOATS: dict[str, Any] = {"flash_attn": "off", "cache_type_k": "f32", "cache_type_v": "f32", "n_threads": 1}
STORY = "The river floods every spring and the people rebuild the bridge. "
PROMPTS = [f"Part {i}. " + STORY * (i % 4) + "Then" for i in range(16)]
LORAS: list[Lora] = [{"x": 1}, {"y": 1}, {}, {"x": 0.25}, {"x": 1, "y": 0.5}]
OF = [LORAS[i % len(LORAS)] for i in range(len(PROMPTS))]
N_NEW = 24
GREEDY = SamplingParams(temperature=0, max_tokens=N_NEW, ignore_eos=True)

Files = dict[str, Path]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("lora")
    return {name: write_lora(folder / f"{name}.gguf", seed=seed) for seed, name in enumerate("xy")}


def chosen(files: Files, scales: Lora) -> tuple[tuple[str, float], ...]:
    """As --lora."""
    return tuple((str(files[str(name)]), scale) for name, scale in scales.items())


def alone(model: Path, files: Files, lora: Lora, prompts: list[str], params: SamplingParams = GREEDY) -> list[str]:
    """Each by itself, in an engine that has just these adapters, at work by default."""
    settings: dict[str, Any] = {
        "n_ctx": 2048,
        "n_parallel": 1,
        "prefix_cache": False,
        "lora": chosen(files, lora),
        **FLOATS,
    }
    with BatchInferenceEngine(model, **settings) as engine:
        return [result.text for prompt in prompts for result in engine.generate([prompt], params)]


@pytest.fixture(scope="module")
def expected(tiny_llama: Path, adapters: Files) -> list[str]:
    texts = {}
    for lora in LORAS:
        mine = [i for i, its in enumerate(OF) if its == lora]
        texts |= dict(zip(mine, alone(tiny_llama, adapters, lora, [PROMPTS[i] for i in mine]), strict=True))
    return [texts[i] for i in range(len(PROMPTS))]


def texts_together(
    engine: BatchInferenceEngine,
    params: SamplingParams = GREEDY,
    prompts: list[str] = PROMPTS,
    loras: list[Lora] = OF,
) -> list[str]:
    names = [engine.add_request(prompt, params, lora=lora) for prompt, lora in zip(prompts, loras, strict=True)]
    texts = dict.fromkeys(names, "")
    while engine.has_work:
        for event in engine.step():
            texts[event.request_id] += event.text
            assert event.finish_reason in (None, FinishReason.LENGTH)
    return [texts[name] for name in names]


def open_engine(model: Path, files: Files, **settings: Any) -> BatchInferenceEngine:
    settings: dict[str, Any] = {"n_ctx": 16384, "n_parallel": 16, **FLOATS, **settings}
    return BatchInferenceEngine(model, lora=chosen(files, {"x": 1, "y": 0}), **settings)


# --- whoever runs beside it -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["unified", "per-sequence"])
def test_16_of_16_texts_mixed_equal_those_of_engines_with_these_adapters_only(
    tiny_llama: Path, adapters: Files, expected: list[str], layout: KvLayout
) -> None:
    assert len(set(expected)) == len(expected)
    with open_engine(tiny_llama, adapters, kv_layout=layout) as engine:
        assert texts_together(engine) == expected
        assert texts_together(engine) == expected  # from the prefix cache
        assert engine.stats().prefix_hits >= 8


def test_on_the_default_model_too(f32_model: Path, tmp_path: Path) -> None:
    shape = LlamaShape(n_layer=30, n_embd=576, n_head=9, n_head_kv=3, n_ff=1536)
    files = {name: write_lora(tmp_path / f"{name}.gguf", shape, seed=i, gain=0.6) for i, name in enumerate("xy")}
    prompts, params = ["Once upon a time", STORY], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    loras: list[Lora] = [{"x": 1}, {"y": 0.5}, {}]
    wanted = [alone(f32_model, files, lora, prompts, params) for lora in loras]
    assert len({str(texts) for texts in wanted}) == len(loras)
    with open_engine(f32_model, files, n_ctx=2048, n_parallel=6, kv_layout="unified") as engine:
        mixed = texts_together(engine, params, prompts * 3, [lora for lora in loras for _ in prompts])
    assert mixed == [text for texts in wanted for text in texts]


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
        for i in range(3):
            for lora in LORAS:
                results = engine.generate([prompt] * 2, GREEDY, lora=lora)
                assert [result.text for result in results] == [wanted[str(lora)]] * 2
                assert i == 0 or all(result.usage.cached_tokens > 0 for result in results)


def test_a_request_that_does_not_say_gets_the_adapters_as_they_were_started(
    tiny_llama: Path, adapters: Files, expected: list[str]
) -> None:
    at_start = {"x": 1, "y": 0.5}
    with BatchInferenceEngine(tiny_llama, n_ctx=2048, lora=chosen(adapters, at_start), **FLOATS) as engine:
        assert [(each.name, each.scale) for each in engine.info.adapters] == [("x", 1), ("y", 0.5)]
        i = OF.index(at_start)
        by_number: Lora = {1: 0.5, 0: 1}
        for lora in (None, at_start, by_number):
            assert engine.generate([PROMPTS[i]], GREEDY, lora=lora)[0].text == expected[i]
        assert engine.generate([PROMPTS[2]], GREEDY, lora={"x": 0, "y": 1e-50})[0].text == expected[OF.index({})]


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lora", "reason"),
    [
        ({"z": 1}, r"no adapter 'z'; there are 'x' \(0\), 'y' \(1\)"),
        ({"X": 1}, "no adapter 'X'"),
        ({2: 1}, "no adapter 2"),
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
        (["x"], "must be an object of adapters and scales"),
        ("x", "must be an object of adapters and scales"),
    ],
)
def test_adapters_that_cannot_be_are_refused(tiny_llama: Path, adapters: Files, lora: Any, reason: str) -> None:
    with open_engine(tiny_llama, adapters, n_ctx=256, n_parallel=1) as engine:
        with pytest.raises(InvalidRequest, match=reason) as raised:
            engine.add_request("a", lora=lora)
        assert raised.value.field == "lora"
        assert not engine.has_work


def test_an_engine_without_adapters_says_so(tiny_llama: Path) -> None:
    with BatchInferenceEngine(tiny_llama, n_ctx=256, n_threads=1) as engine:
        with pytest.raises(InvalidRequest, match=r"no adapter 'x'; there are none \(--lora\)"):
            engine.add_request("a", lora={"x": 1})
        assert engine.generate(["a"], GREEDY, lora={})[0].text


# --- in a worker process, over HTTP ---------------------------------------------------------------------------------


async def test_a_killed_workers_requests_go_on_with_their_adapters(
    tiny_llama: Path, adapters: Files, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_FIRST_PAUSE_S", 0.001)
    at_start = chosen(adapters, {"x": 1, "y": 0})
    settings: dict[str, Any] = {"n_ctx": 16384, "n_parallel": 16, **FLOATS, "lora": at_start}
    n_events = 0

    async def one(engine: EngineProcess, i: int) -> str:
        nonlocal n_events
        text = ""
        request = GenerationRequest(id=str(i), prompt=PROMPTS[i], params=GREEDY, lora=OF[i])
        async for event in engine.submit(request):
            text += event.text
            n_events += 1
            if n_events in (20, 120):
                (state,) = await engine.workers()
                if state.pid:
                    os.kill(state.pid, signal.SIGKILL)
        return text

    async with EngineProcess(tiny_llama, **settings) as engine:
        assert [each.name for each in engine.info.adapters] == ["x", "y"]
        assert await asyncio.gather(*(one(engine, i) for i in range(len(PROMPTS)))) == expected
        (state,) = await engine.workers()
        assert state.restarts == 2
        with pytest.raises(InvalidRequest, match="no adapter 'z'"):
            await anext(engine.submit(GenerationRequest(id="bad", prompt="a", lora={"z": 1})))


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
    async with LocalEngine(tiny_llama, **settings) as engine, TestClient(TestServer(create_app(engine))) as http:
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
