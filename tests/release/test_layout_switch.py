"""A switch of the KV layout in LocalEngine and EngineProcess: no client notices it, nor a crash around it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cppbatch import BatchInferenceEngine, FinishReason, GenerationRequest, LocalEngine, SamplingParams
from cppbatch.cluster.engines.client import EngineClient
from cppbatch.cluster.engines.process import EngineProcess
from tests.support.listening import until
from tests.support.native_engines import SETTINGS

PARAMS = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)
SHORT = {f"short {i}": f"{i} and then " * (i + 1) for i in range(3)}
LONG = "x" * 400  # more tokens than a stream's 256 cells


@pytest.fixture(scope="module")
def expected(tiny_llama: Path) -> dict[str, str]:
    """The text of each request, in an engine that never switches."""
    prompts = SHORT | {"long": LONG}
    with BatchInferenceEngine(tiny_llama, kv_layout="unified", **SETTINGS) as engine:
        results = engine.generate(list(prompts.values()), PARAMS)
    return dict(zip(prompts, (result.text for result in results), strict=True))


class Clients:
    """Submits the short requests, and the long one once each of them has a token."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self.n_events = dict.fromkeys([*SHORT, "long"], 0)
        self.last_event_at = time.monotonic()
        self.submitted_long = asyncio.Event()

    async def texts(self) -> dict[str, str]:
        tasks = {name: asyncio.create_task(self._text(name, prompt)) for name, prompt in SHORT.items()}
        await until(lambda: all(self.n_events[name] for name in SHORT))
        tasks["long"] = asyncio.create_task(self._text("long", LONG))
        self.submitted_long.set()
        return {name: await asyncio.wait_for(task, 60) for name, task in tasks.items()}

    async def _text(self, name: str, prompt: str) -> str:
        text, last = "", None
        async for event in self._engine.submit(GenerationRequest(id=name, prompt=prompt, params=PARAMS)):
            assert last is None, "an event after the last one"
            text, last = text + event.text, event.finish_reason
            self.n_events[name] += 1
            self.last_event_at = time.monotonic()
        assert last is FinishReason.LENGTH
        return text


@pytest.mark.parametrize("kind", [LocalEngine, EngineProcess])
async def test_texts_continue_through_a_switch(
    kind: Callable[..., Any], tiny_llama: Path, expected: dict[str, str]
) -> None:
    async with kind(tiny_llama, **SETTINGS) as engine:
        assert (await engine.stats()).kv_layout == "per-sequence"
        assert await Clients(engine).texts() == expected
        stats = await engine.stats()
        assert (stats.kv_layout, stats.layout_switches, stats.recomputes) == ("unified", 1, 0)
        assert (stats.kv_cells_used, stats.swapped_bytes) == (0, 0)


@pytest.mark.usefixtures("no_pause")
@pytest.mark.parametrize("moment", ["before", "in", "after"])
async def test_a_worker_that_dies_around_a_switch_costs_no_token(
    tiny_llama: Path, expected: dict[str, str], moment: str
) -> None:
    """The switch takes a second here, so that the worker can be killed in it."""
    is_time: dict[str, Callable[[Clients], bool]] = {
        "before": lambda clients: True,
        "in": lambda clients: time.monotonic() - clients.last_event_at > 0.3,
        "after": lambda clients: clients.n_events["long"] >= 10,
    }
    async with EngineProcess(tiny_llama, runtime="tests.support.failing_runtimes:slow_to_switch", **SETTINGS) as engine:
        clients = Clients(engine)
        answers = asyncio.create_task(clients.texts())
        await clients.submitted_long.wait()
        await until(lambda: is_time[moment](clients))
        assert bool(clients.n_events["long"]) == (moment == "after")
        worker = engine._supervisor.worker
        assert worker
        assert worker.pid
        os.kill(worker.pid, signal.SIGKILL)
        assert await answers == expected
        assert engine._supervisor.restarts == 1
        stats = await engine.stats()
        assert (stats.kv_layout, stats.layout_switches) == ("unified", 1)  # counted by the second worker
