"""A `LocalEngine` answers each of its requests, whatever ends its thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import pytest_asyncio

from cppbatch import EngineConfig, GenerationRequest, LocalEngine
from cppbatch.engine.request import FinishReason, GenerationEvent
from cppbatch.errors import EngineClosed
from tests.support.fakes import fake_engine, greedy


@pytest_asyncio.fixture
async def engine() -> AsyncIterator[LocalEngine]:
    with fake_engine() as lender:
        async with LocalEngine(EngineConfig("model.gguf"), runtime=lender.core.runtime) as engine:
            yield engine


async def run(engine: LocalEngine) -> list[GenerationEvent]:
    return [event async for event in engine.submit(GenerationRequest(id="a", prompt=[1, 2], params=greedy(50)))]


def raise_error(error: BaseException) -> Any:
    raise error


async def test_a_closing_engine_takes_no_request_even_if_no_thread_is_free_to_wait_for_its_end(
    engine: LocalEngine,
) -> None:
    free = threading.Event()
    threads = ThreadPoolExecutor(1)
    asyncio.get_running_loop().set_default_executor(threads)
    threads.submit(free.wait, 20)
    closing = asyncio.create_task(engine.close())
    await asyncio.sleep(0)
    with pytest.raises(EngineClosed, match="it is closed"):
        await run(engine)
    free.set()
    await closing


async def test_a_step_that_raises_system_exit_ends_the_requests_as_any_other_error(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine._engine, "step", lambda: raise_error(SystemExit(3)))
    (last,) = await asyncio.wait_for(run(engine), 20)
    assert last.finish_reason is FinishReason.ERROR
    assert engine.health().error == last.error == "SystemExit: 3"
    with pytest.raises(EngineClosed, match="it is failed: SystemExit"):
        await run(engine)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_requests_end_even_if_the_engine_cannot_be_closed(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = asyncio.create_task(run(engine))
    await asyncio.sleep(0)
    assert engine._engine
    monkeypatch.setattr(engine._engine.inputs, "close", lambda: raise_error(RuntimeError("boom")))
    await engine.close()
    assert (await asyncio.wait_for(running, 20))[-1].finish_reason is FinishReason.CANCELLED
