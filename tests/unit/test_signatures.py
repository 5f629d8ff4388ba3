"""Keyword arguments of the public API are typed: type checkers and editors see each of them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import pytest
from mypy import api

import cppbatch
from cppbatch import BatchInferenceEngine, EngineConfig, EngineProcess, GenerationRequest, LocalEngine, generate_batch
from cppbatch.engine.request import RequestOptions
from cppbatch.engine_settings import EngineSettings
from cppbatch.sizing.profile import TunedSettings

PROGRAM = """
from cppbatch import BatchInferenceEngine, EngineConfig, Pair, SamplingParams, generate_batch

with BatchInferenceEngine("model.gguf", n_ctx=4096, kv_layout="unified", lora=(("a.gguf", 1.0),)) as engine:
    for completion in engine.generate(["a", [1, 2]], SamplingParams(max_tokens=8), n=2, priority=1, timeout=None):
        print(completion.text.upper(), completion.usage.prompt_tokens)
    for event in engine.stream("a", cache_salt="b", lora={"a": 0.5, 0: 1}):
        print(event.text, event.finish_reason)
    for result in engine.map([("a", SamplingParams()), "b"], ordered=True, clamp_max_tokens=True):
        print(result.index, result.completion.error)
    print(engine.embed(["a", Pair("query", "document")], dimensions=8, priority=2).shape)
    answer = engine.chat("a", system="b", tools=[{"type": "function"}], priority=1)
    messages: list[dict[str, str]] = [{"role": "user", "content": "a"}]
    print(answer.text, answer.tool_calls, engine.chat(messages).message, engine.generate([messages, "a"])[0].text)
    for each in engine.chat(["a", messages], [SamplingParams(), SamplingParams()], on_event=print, timeout=3):
        print(each.reasoning.upper(), each.finish_reason)
    with engine.chat_stream(messages, SamplingParams(), tool_choice="auto") as stream:
        print("".join(event.text for event in stream), stream.completion)
    name: str = engine.add_request("a", request_id="b", task="embed", queue_timeout=3.5)
print(generate_batch("model.gguf", ["a"], n_threads=2)[0].finish_reason.value)
print(generate_batch(engine, ["a"], max_tokens=50, temperature=0.7, top_p=0.9, seed=42)[0].token_texts[0].upper())
print(engine.forward_batch([[1, 2], [3]], priority=1).shape)
print(engine.generate_grid(["a", [1]], [SamplingParams(), SamplingParams(seed=1)])[1][0].text)
print(BatchInferenceEngine(EngineConfig(model_path="model.gguf"), swap_space=0).info.n_embd)
print(EngineConfig("model.gguf", n_ctx=4096), SamplingParams(stop=["\\n"], stop_token_ids=[1], samplers=["top_k"]))
"""

WRONG = {
    'BatchInferenceEngine("a", n_parralel=4)': "n_parralel",
    'BatchInferenceEngine("a", kv_layout="paged")': "kv_layout",
    'BatchInferenceEngine("a").generate(["a"], temperature=0)': "temperature",
    'BatchInferenceEngine("a").stream("a", timeout="soon")': "timeout",
    'BatchInferenceEngine("a").chat_stream("a", sistem="b")': "sistem",
    'LocalEngine("a").chat("a", tool="b")': "tool",
    'BatchInferenceEngine("a").map(["a"], order=True)': "order",
    'BatchInferenceEngine("a").embed(["a"], cache=False)': "cache",
    'BatchInferenceEngine("a").add_request("a", prio=1)': "prio",
    'generate_batch("a", ["a"], n_ctxt=1)': "n_ctxt",
    'generate_batch("a", ["a"], temprature=1)': "temprature",
    'LocalEngine("a", n_ctxt=1)': "n_ctxt",
    'EngineProcess("a", n_ctxt=1)': "n_ctxt",
}


def fields(struct: type[msgspec.Struct], *without: str) -> dict[str, Any]:
    return {name: kind for name, kind in get_type_hints(struct).items() if name not in without}


def test_engine_settings_are_the_fields_of_the_config() -> None:
    assert get_type_hints(EngineSettings) == fields(EngineConfig, "model_path")
    assert not EngineSettings.__required_keys__


def test_the_settings_of_a_profile_have_the_types_of_the_config() -> None:
    assert get_type_hints(TunedSettings).items() <= get_type_hints(EngineConfig).items()


def test_request_options_are_the_fields_of_the_request() -> None:
    assert get_type_hints(RequestOptions) == fields(
        GenerationRequest, "id", "prompt", "task", "params", "client", "report_acceptance"
    )
    assert not RequestOptions.__required_keys__


@pytest.mark.parametrize(
    "function",
    [
        BatchInferenceEngine.__init__, BatchInferenceEngine.generate, BatchInferenceEngine.stream,
        BatchInferenceEngine.map, BatchInferenceEngine.chat, BatchInferenceEngine.chat_stream,
        LocalEngine.chat, LocalEngine.chat_stream, BatchInferenceEngine.embed, BatchInferenceEngine.add_request,
        LocalEngine.__init__, EngineProcess.__init__, generate_batch,
    ],
)  # fmt: skip
def test_no_keyword_argument_is_any(function: Callable[..., Any]) -> None:
    assert {kind for kind in function.__annotations__.values() if "Any" in str(kind)} == set()


def test_a_type_checker_accepts_right_keywords_and_refuses_wrong_ones(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert request.config.cache
    cache = request.config.cache.mkdir("mypy")
    right, wrong = cache / "right.py", cache / "wrong.py"
    right.write_text(PROGRAM)
    imports = "from cppbatch import BatchInferenceEngine, EngineProcess, LocalEngine, generate_batch"
    wrong.write_text("\n".join([imports, *WRONG]))
    monkeypatch.chdir(Path(cppbatch.__file__).parent.parent)
    limit = sys.getrecursionlimit()
    try:
        report, errors, _ = api.run(
            ["--config-file=", "--strict", "--follow-imports=silent", f"--cache-dir={cache}", str(right), str(wrong)]
        )
    finally:
        sys.setrecursionlimit(limit)  # mypy raises it for the whole process, and with it what is nested too deeply
    assert errors == ""
    complaints = [line for line in report.splitlines() if ": error:" in line]
    assert [line for line in complaints if "wrong.py:" not in line] == []
    for number, (line, keyword) in enumerate(WRONG.items(), start=2):
        at_line = [complaint for complaint in complaints if f"wrong.py:{number}: " in complaint]
        assert any(f'"{keyword}"' in complaint for complaint in at_line), f"{line}: {at_line}"
