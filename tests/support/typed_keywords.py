"""Nothing runs this module: mypy checks it, so type checkers accept the right keywords of the public API.

They refuse the wrong ones: under `warn_unused_ignores` of `strict`, an `ignore` without its error is an error.
"""

from __future__ import annotations

from cppbatch import (
    BatchInferenceEngine,
    EngineConfig,
    EngineProcess,
    LocalEngine,
    Pair,
    SamplingParams,
    generate_batch,
)


def right() -> None:
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
        print(engine.add_request("a", request_id="b", task="embed", queue_timeout=3.5).upper())
    print(generate_batch("model.gguf", ["a"], n_threads=2)[0].finish_reason.value)
    print(generate_batch(engine, ["a"], max_tokens=50, temperature=0.7, top_p=0.9, seed=42)[0].token_texts[0].upper())
    print(engine.forward_batch([[1, 2], [3]], priority=1).shape)
    print(engine.generate_grid(["a", [1]], [SamplingParams(), SamplingParams(seed=1)])[1][0].text)
    print(BatchInferenceEngine(EngineConfig(model_path="model.gguf"), swap_space=0).info.n_embd)
    print(EngineConfig("model.gguf", n_ctx=4096), SamplingParams(stop=["\n"], stop_token_ids=[1], samplers=["top_k"]))


async def wrong() -> None:
    BatchInferenceEngine("a", n_parralel=4)  # type: ignore[call-arg]
    BatchInferenceEngine("a", kv_layout="paged")  # type: ignore[arg-type]
    BatchInferenceEngine("a").generate(["a"], temperature=0)  # type: ignore[call-arg]
    BatchInferenceEngine("a").stream("a", timeout="soon")  # type: ignore[arg-type]
    BatchInferenceEngine("a").chat_stream("a", sistem="b")  # type: ignore[call-arg]
    await LocalEngine("a").chat("a", tool="b")  # type: ignore[call-arg]
    BatchInferenceEngine("a").map(["a"], order=True)  # type: ignore[call-arg]
    BatchInferenceEngine("a").embed(["a"], cache=False)  # type: ignore[call-arg]
    BatchInferenceEngine("a").add_request("a", prio=1)  # type: ignore[call-arg]
    generate_batch("a", ["a"], n_ctxt=1)  # type: ignore[call-arg]
    generate_batch("a", ["a"], temprature=1)  # type: ignore[call-arg]
    LocalEngine("a", n_ctxt=1)  # type: ignore[call-arg]
    EngineProcess("a", n_ctxt=1)  # type: ignore[call-arg]
