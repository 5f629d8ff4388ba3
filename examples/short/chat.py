"""A conversation in the terminal. Ctrl-C stops an answer; an empty line ends the conversation."""

import contextlib

from cppbatch import BatchInferenceEngine, SamplingParams, pull_default

messages: list[dict[str, object]] = []
with contextlib.suppress(EOFError), BatchInferenceEngine(pull_default()) as engine:
    while question := input("\n> "):
        messages.append({"role": "user", "content": question})
        stream = engine.chat_stream(messages, SamplingParams(max_tokens=500))
        with contextlib.suppress(KeyboardInterrupt), stream:
            for event in stream:
                print(event.text, end="", flush=True)
        messages.append(stream.message)
