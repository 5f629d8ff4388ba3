"""One engine under threads, a fork, and Ctrl-C at any moment. Real llama.cpp, tiny model."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cppbatch import BatchInferenceEngine, SamplingParams
from cppbatch.errors import EngineClosed
from tests.support.fixtures import shared_engine

SHORT = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
PARAMS = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
PROMPTS = [f"{'abc' * (i % 5)} {i}" for i in range(50)]

engine = shared_engine(n_ctx=4096, n_parallel=8, n_threads=1, cache_type_k="f32")


@pytest.fixture(scope="module")
def alone(engine: BatchInferenceEngine) -> dict[str, str]:
    """The text of each prompt when nothing else is in the batch."""
    return {prompt: engine.generate([prompt], PARAMS)[0].text for prompt in PROMPTS}


def test_closing_waits_for_the_threads_that_read_the_vocabulary(tiny_llama: Path) -> None:
    for seed in range(4):  # each aborted the process
        engine = BatchInferenceEngine(tiny_llama, n_ctx=4096, n_parallel=4, n_threads=1)

        def work(engine: BatchInferenceEngine = engine) -> None:
            while True:
                engine.generate(["hello there " * 100] * 4, SHORT)

        with ThreadPoolExecutor(3) as threads:
            calls = [threads.submit(work) for _ in range(3)]
            time.sleep(0.05 + 0.02 * seed)
            engine.close()
            assert {type(call.exception(30)) for call in calls} == {EngineClosed}


def test_8_threads_with_50_short_calls_each_get_the_texts_they_get_alone(
    engine: BatchInferenceEngine, alone: dict[str, str]
) -> None:
    def calls(thread: int) -> dict[str, str]:
        order = random.Random(thread).sample(PROMPTS, len(PROMPTS))
        return {prompt: engine.generate([prompt], PARAMS)[0].text for prompt in order}

    with ThreadPoolExecutor(8) as threads:
        for texts in threads.map(calls, range(8)):
            assert texts == alone
    assert not engine.has_work


@pytest.mark.usefixtures("no_gc_callbacks")
def test_ctrl_c_at_50_random_moments_beside_other_threads(engine: BatchInferenceEngine, alone: dict[str, str]) -> None:
    rng, ends = random.Random(24), threading.Event()

    def others() -> bool:
        while not ends.is_set():
            prompt = rng.choice(PROMPTS)
            if engine.generate([prompt], PARAMS)[0].text != alone[prompt]:
                return False
        return True

    def interrupted() -> None:
        while True:
            list(engine.stream("abc", PARAMS))
            engine.generate(PROMPTS[:10], PARAMS)
            list(engine.map(PROMPTS[:10], PARAMS))

    with ThreadPoolExecutor(3) as threads:
        running = [threads.submit(others) for _ in range(3)]
        try:
            for _ in range(50):
                ctrl_c = threading.Timer(rng.uniform(0.001, 0.03), os.kill, (os.getpid(), signal.SIGINT))
                with pytest.raises(KeyboardInterrupt):  # noqa: PT012  also while the timer starts
                    ctrl_c.start()
                    interrupted()
        finally:
            ends.set()
        assert all(future.result(timeout=30) for future in running)
    assert not engine.has_work
    engine.clear_prefix_cache()
    engine.core.kv.check()
    assert engine.core.kv.n_used == 0
    assert {prompt: engine.generate([prompt], PARAMS)[0].text for prompt in PROMPTS} == alone


FORKED = """
import os, sys
from cppbatch import BatchInferenceEngine, SamplingParams

with BatchInferenceEngine(sys.argv[1], n_ctx=256, n_parallel=2) as engine:
    engine.generate(["abc"], SamplingParams(max_tokens=2))
    child = os.fork()
    if not child:
        try:
            engine.generate(["abc"], SamplingParams(max_tokens=2))
        except Exception as error:
            print(type(error).__name__, error, flush=True)
    else:
        os.waitpid(child, 0)
        print(len(engine.generate(["abc"], SamplingParams(max_tokens=2, ignore_eos=True))[0].tokens))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows has no fork")
def test_a_forked_child_raises_at_once_and_the_parent_continues(tiny_llama: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKED, str(tiny_llama)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    refused, goes_on = done.stdout.splitlines()
    assert refused.startswith("EngineClosed the engine was loaded in process ")
    assert "load the engine after the fork" in refused
    assert goes_on == "2"
