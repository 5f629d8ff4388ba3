"""Texts with LoRA adapters: each alone in a separate engine, and all together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cppbatch import BatchInferenceEngine, FinishReason, SamplingParams
from tests.support.lora_files import write_lora

Lora = dict[str | int, float]
FLOATS: dict[str, Any] = {"flash_attn": "off", "cache_type_k": "f32", "cache_type_v": "f32", "n_threads": 1}
STORY = "The river floods every spring and the people rebuild the bridge. "
PROMPTS = [f"Part {i}. " + STORY * (i % 4) + "Then" for i in range(16)]
LORAS: list[Lora] = [{"x": 1}, {"y": 1}, {}, {"x": 0.25}, {"x": 1, "y": 0.5}]
OF = [LORAS[i % len(LORAS)] for i in range(len(PROMPTS))]
N_NEW = 24
GREEDY = SamplingParams(temperature=0, max_tokens=N_NEW, ignore_eos=True)
Files = dict[str, Path]


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


def texts_together(
    engine: BatchInferenceEngine, params: SamplingParams = GREEDY, prompts: list[str] = PROMPTS, loras: list[Lora] = OF
) -> list[str]:
    names = [engine.add_request(prompt, params, lora=lora) for prompt, lora in zip(prompts, loras, strict=True)]
    texts = dict.fromkeys(names, "")
    while engine.has_work:
        for event in engine.step():
            texts[event.request_id] += event.text
            assert event.finish_reason in (None, FinishReason.LENGTH)
    return [texts[name] for name in names]


def open_engine(model: Path, files: Files, **settings: Any) -> BatchInferenceEngine:
    its: dict[str, Any] = {"n_ctx": 16384, "n_parallel": 16, **FLOATS, **settings}
    return BatchInferenceEngine(model, lora=chosen(files, {"x": 1, "y": 0}), **its)


def texts_apart(model: Path, files: Files) -> list[str]:
    """The text of each of PROMPTS with its adapters, each alone."""
    texts: dict[int, str] = {}
    for lora in LORAS:
        mine = [i for i, its in enumerate(OF) if its == lora]
        texts |= dict(zip(mine, alone(model, files, lora, [PROMPTS[i] for i in mine]), strict=True))
    return [texts[i] for i in range(len(PROMPTS))]


def make_adapters(folder: Path) -> Files:
    """Two adapters for the tiny Llama."""
    return {name: write_lora(folder / f"{name}.gguf", seed=seed) for seed, name in enumerate("xy")}
