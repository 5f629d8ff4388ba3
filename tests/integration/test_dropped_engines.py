"""Engines of real models that a notebook drops, a fork inherits, or a program leaves open at its end."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import psutil
import pytest

from cppbatch import BatchInferenceEngine
from cppbatch.errors import LlamaError
from cppbatch.llama import Context, Model

SIZES: dict[str, Any] = {"n_ctx": 2048, "n_parallel": 4, "n_threads": 1}


def run(program: str, model: Path) -> str:
    """What a program prints; it must not write anything to stderr."""
    done = subprocess.run(
        [sys.executable, "-c", program, model], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


NOTEBOOK = """
import asyncio, sys, threading
import psutil
from cppbatch import BatchInferenceEngine, EngineProcess, GenerationRequest, LocalEngine, SamplingParams

SIZES = {"n_ctx": 262144, "n_parallel": 4, "n_threads": 1, "kv_layout": "unified"}  # 64 MiB of cells
this, params = psutil.Process(), SamplingParams(max_tokens=4)

def mib():
    return this.memory_info().rss >> 20

def offline():
    engine = BatchInferenceEngine(sys.argv[1], **SIZES)
    engine.generate(["a", "b"], params)
    return mib()

async def with_asyncio(kind):
    engine = kind(sys.argv[1], **SIZES)
    await engine.loaded()
    assert [event async for event in engine.submit(GenerationRequest(id="a", prompt="a", params=params))]
    size = mib()
    del engine
    for _ in range(1000):
        await asyncio.sleep(0.01)
        if not this.children() and all(thread.name != "cppbatch-engine" for thread in threading.enumerate()):
            return size
    raise SystemExit("it is not freed")

before = mib()
one = offline()
assert one - before > 64, (before, one)
print(one, max(offline() for _ in range(19)))
print(one, max(asyncio.run(with_asyncio(LocalEngine)) for _ in range(3)))
print(one, max(asyncio.run(with_asyncio(EngineProcess)) for _ in range(1)))
"""


def test_dropped_engines_take_the_memory_of_one_and_leave_no_thread_or_process(tiny_llama: Path) -> None:
    for line in run(NOTEBOOK, tiny_llama).splitlines():
        one, most = map(int, line.split())
        assert most <= 1.1 * one


LEFT_OPEN = """
import asyncio, sys
from cppbatch import BatchInferenceEngine, EngineProcess, GenerationRequest, Llama, LocalEngine, SamplingParams

SIZES = {"n_ctx": 2048, "n_parallel": 4, "n_threads": 1}
engine = BatchInferenceEngine(sys.argv[1], **SIZES)
events = engine.stream("a", 100)
next(events)
cycle = BatchInferenceEngine(sys.argv[1], **SIZES)
cycle.me = cycle
llm = Llama(sys.argv[1], n_ctx=256, n_threads=1, verbose=False)
chunks = llm("a", max_tokens=50, stream=True)
next(chunks)

async def main():
    engines = LocalEngine(sys.argv[1], **SIZES), EngineProcess(sys.argv[1], **SIZES)
    for each in engines:
        await each.loaded()
    events = engines[0].submit(GenerationRequest(id="a", prompt="a", params=SamplingParams(max_tokens=1000)))
    await anext(events)
    return *engines, events, LocalEngine(sys.argv[1], **SIZES)

left = asyncio.run(main())
del cycle
"""


def test_engines_that_are_open_at_the_end_of_a_program_end_with_it_in_silence(tiny_llama: Path) -> None:
    assert run(LEFT_OPEN, tiny_llama) == ""


FORKED = """
import gc, os, sys
from cppbatch import BatchInferenceEngine, Llama

engines = [BatchInferenceEngine(sys.argv[1], n_ctx=2048, n_parallel=4, n_threads=1)]
engines.append(Llama(sys.argv[1], n_ctx=256, n_threads=1, verbose=False))
engines[0].generate(["a"], 4)
if (child := os.fork()) == 0:
    engines.pop()
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
assert len(engines[0].generate(["a", "b"], 4)) == 2
assert engines[1]("a", max_tokens=2)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_that_drops_an_engine_leaves_its_parents_engine_alone(tiny_llama: Path) -> None:
    run(FORKED, tiny_llama)


def test_an_engine_in_a_cycle_with_its_requests_is_freed_by_garbage_collection(tiny_llama: Path) -> None:
    class Notebook:
        def __init__(self) -> None:
            self.engine = BatchInferenceEngine(tiny_llama, **SIZES)
            self.engine.add_request("a", {"max_tokens": 50, "temperature": 0, "logits_processor": self.process})
            self.engine.step()
            self.events = self.engine.stream("b", 50)
            next(self.events)

        def process(self, _tokens: object, _logits: object) -> None:
            assert self.engine

    context = weakref.ref(Notebook().engine.core.runtime.context)
    gc.collect()
    assert context() is None


def test_a_model_and_its_context_are_freed_with_their_last_references(tiny_llama: Path) -> None:
    gc.disable()
    try:
        before = psutil.Process().memory_info().rss
        for _ in range(4):
            model = Model(tiny_llama)
            context = Context(model, n_ctx=131072, n_threads=1)
            vocab = model.vocab
            del model
            assert context.n_ctx == 131072
            assert vocab.tokenize("a").size
            del context
            assert vocab.tokenize("a").size  # the model is still open
            del vocab
        assert psutil.Process().memory_info().rss - before < 24 << 20
    finally:
        gc.enable()


def test_the_vocabulary_of_a_closed_model_raises(tiny_llama: Path) -> None:
    with Model(tiny_llama) as model:
        vocab = model.vocab
    with pytest.raises(LlamaError, match="the vocabulary's model is closed"):
        vocab.tokenize("a")
