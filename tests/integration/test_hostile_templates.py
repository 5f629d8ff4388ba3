"""A server whose models have chat templates that never end: they are stopped, and other models are not delayed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from cppbatch import LocalEngine
from cppbatch.chat import template_program
from cppbatch.chat.template import CHATML
from cppbatch.chat.template_program import Limits, TemplateProgram, program_of
from cppbatch.server.settings import ServerSettings
from tests.integration.test_many_models import serve
from tests.support import tiny_models
from tests.support.conversations import CONVERSATIONS, TOOLS
from tests.support.hostile_templates import HOSTILE, LONG
from tests.support.http_client import Http, get, http_to, post
from tests.support.llama_cpp_source import chat_templates

HELLO = [{"role": "user", "content": "X"}]
CLIENTS = 12  # more than the threads that models share


class Health:
    """The slowest answer of `/health`, which is asked all the time."""

    slowest = 0.0


@asynccontextmanager
async def health_of(http: Http) -> AsyncIterator[Health]:
    health = Health()

    async def ask() -> None:
        while True:
            began = time.monotonic()
            assert (await get(http, "/health"))[0] == 200
            health.slowest = max(health.slowest, time.monotonic() - began)
            await asyncio.sleep(0.01)

    asking = asyncio.create_task(ask())
    try:
        yield health
        assert not asking.done()
    finally:
        asking.cancel()


async def timed(http: Http, path: str, body: object) -> tuple[float, int, Any]:
    began = time.monotonic()
    status, answer = await post(http, path, body)
    return time.monotonic() - began, status, answer


async def test_a_hostile_template_in_the_models_folder_delays_no_other_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = Limits(rendering=0.7, slow=0.5, pause=60)
    monkeypatch.setattr(template_program, "program_of", lambda source: TemplateProgram(source, limits))
    monkeypatch.setattr("cppbatch.chat.template.program_of", lambda source: TemplateProgram(source, limits))
    tiny_models.llama(tmp_path / "honest.gguf", chat_template=CHATML)
    tiny_models.llama(tmp_path / "hostile.gguf", chat_template=HOSTILE["later"])
    body = {"model": "hostile", "messages": HELLO, "max_tokens": 1}
    async with serve(tmp_path) as http:
        quick = [{"role": "user", "content": "Y"}]
        loads = (post(http, "/apply-template", {"model": model, "messages": quick}) for model in ("honest", "hostile"))
        assert [status for status, _ in await asyncio.gather(*loads)] == [200, 200]
        async with health_of(http) as health:
            stopped = [asyncio.create_task(timed(http, "/v1/chat/completions", body)) for _ in range(CLIENTS)]
            n = 0
            while not all(task.done() for task in stopped):
                took, status, _ = await timed(http, "/apply-template", {"model": "honest", "messages": HELLO})
                assert status == 200
                assert took < 0.5
                n += 1
            results = [task.result() for task in stopped]
    assert n > 3
    assert health.slowest < 0.5
    assert {status for _, status, _ in results} == {400}
    assert max(took for took, _, _ in results) < 5
    messages = {answer["error"]["message"] for _, _, answer in results}
    assert all("the chat template takes longer than 0.7 s; it is tried again in" in message for message in messages)


def _honest() -> dict[str, str]:
    """Chat templates of many models, and each with an operation for which it renders in a child process."""
    templates = chat_templates()
    return templates | {f"{name}, in a child": source + "{{ '' | center(0) }}" for name, source in templates.items()}


@pytest.mark.soak
@pytest.mark.timeout(1800)
async def test_200_templates_are_rendered_or_stopped_and_the_server_answers(tiny_llama: Path) -> None:
    honest, hostile = _honest(), HOSTILE | {f"long {name}": source for name, source in LONG.items()}
    assert len(honest) + len(hostile) >= 200
    table: list[tuple[str, float, float]] = []
    async with LocalEngine(tiny_llama, n_ctx=1024, n_parallel=2, n_threads=1) as engine:
        for name, source in {**honest, **hostile}.items():
            program_of.cache_clear()
            conversations = [{"messages": each.messages, "tools": each.tools or []} for each in CONVERSATIONS.values()]
            bodies = conversations if name in honest else [{"messages": HELLO, "tools": TOOLS}] * CLIENTS
            async with http_to(engine, ServerSettings(chat_template=source)) as http, health_of(http) as health:
                results = await asyncio.gather(*(timed(http, "/apply-template", body) for body in bodies))
            slowest = max(took for took, _, _ in results)
            table.append((name, slowest, health.slowest))
            statuses = {status for _, status, _ in results}
            print(f"{name:60} {slowest:6.2f} s  /health {health.slowest:5.2f} s  {sorted(statuses)}", flush=True)
            assert statuses <= {200, 400}, name
            assert slowest < 6, name
            assert health.slowest < 1, name
            if name in honest:
                assert 200 in statuses, (name, results)
    print(f"{len(honest)} honest, {len(hostile)} hostile; /health at most {max(row[2] for row in table):.2f} s")
