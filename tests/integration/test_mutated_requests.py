"""Thousands of requests that are wrong in random ways: each gets an answer, none is a server error, nothing stays."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from cppbatch.server.app import create_app
from cppbatch.server.http.limits import Limits
from cppbatch.server.settings import ServerSettings
from tests.support.app_thread import AppThread
from tests.support.mutations import Mutant, mutant
from tests.support.randomised import cases

SEED = 20_240_611
AT_ONCE = 32
LONGEST = 30.0  # seconds that an answer may take
LONGEST_ERROR = 6000  # bytes: texts of a request are quoted cut
UNREAD = 65_536  # bytes that the kernel may hold for a server that does not read them
LAST = {"message_stop", "error", "response.completed", "response.incomplete"}
SERVERS_OWN = {"server_error", "api_error", "overloaded_error"}
ADDRESS = re.compile(rb" object at 0x|\b0x[0-9a-f]{6}")
NORMAL = b'{"prompt": "Hello", "temperature": 0, "max_tokens": 8, "ignore_eos": true, "cache_prompt": false}'
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"


@pytest.fixture
def server(tiny_llama: Path) -> Iterator[AppThread]:
    limits = Limits(max_tokens=8, max_n=4)
    engine = {"model": tiny_llama, "n_ctx": 4096, "n_parallel": 16, "n_threads": 1, "max_queue": 100_000}
    app = AppThread(engine, lambda client: create_app(client, ServerSettings(limits=limits)))
    yield app
    app.stop()


async def exchange(server: AppThread, data: bytes) -> bytes:
    """All that the server answers to these bytes."""
    host = urlsplit(server.url)
    reader, writer = await asyncio.open_connection(host.hostname, host.port)
    try:
        writer.write(data)
        return await reader.read()
    except ConnectionResetError:  # refused before all was read
        return b""
    finally:
        writer.close()


def parsed(answer: bytes) -> tuple[int, dict[str, str], bytes]:
    """Status, headers, body."""
    head, _, body = answer.partition(b"\r\n\r\n")
    if head.startswith(b"HTTP/1.1 100"):
        return parsed(body)
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if headers.get("transfer-encoding") == "chunked":
        body = _joined(body)
    return int(first.split()[1]), headers, body


def _joined(chunked: bytes) -> bytes:
    body = b""
    while chunked:
        size, _, rest = chunked.partition(b"\r\n")
        n = int(size, 16)
        body += rest[:n]
        chunked = rest[n + 2 :] if n else b""
    return body


def complaint(sent: Mutant, answer: bytes) -> str | None:
    """What is wrong with an answer, if anything is."""
    if not answer:  # invalid HTTP is refused before it is read; the kernel may then drop the refusal
        return "no answer" if sent.whole and len(sent.data) < UNREAD else None
    status, headers, body = parsed(answer)
    kind, _, _ = headers.get("content-type", "").partition(";")
    if status >= 500:
        return f"{status}: {body[:300]!r}"
    if sent.method in ("HEAD", "OPTIONS") or (
        status in (400, 417) and kind == "text/plain"
    ):  # aiohttp's answer to invalid HTTP
        return None
    if kind == "text/event-stream":
        return _stream_complaint(body)
    if status == 200:
        is_text = kind in ("text/plain", "text/html")  # metrics; the web page
        return None if is_text or json.loads(body) else f"200 with nothing: {body!r}"
    error = json.loads(body)["error"] if kind == "application/json" and len(body) <= LONGEST_ERROR else {}
    return (
        None if error.get("message") and error.get("type") else f"{status} with no short error object: {body[:200]!r}"
    )


def address_in(answer: bytes) -> str | None:
    """The part of an answer that shows where an object is in the server's memory, if any does."""
    found = ADDRESS.search(answer)
    return found and f"an address of memory: {answer[max(0, found.start() - 100) : found.end() + 20]!r}"


def _stream_complaint(body: bytes) -> str | None:
    *events, rest = body.decode().split("\n\n")
    *data, last = [event.split("data: ", 1)[1] for event in events]
    if rest or (last != "[DONE]" and json.loads(last)["type"] not in LAST):
        return f"a stream without its end: {body[-200:]!r}"
    chunks = [json.loads(each) for each in (*data, last) if each != "[DONE]"]
    errors = [chunk["error"] for chunk in chunks if "error" in chunk]
    return next((f"in a stream: {error}" for error in errors if error["type"] in SERVERS_OWN), None)


async def storm(server: AppThread, n: int) -> tuple[list[str], Counter[str], float]:
    """Sends `n` mutants. What went wrong, how often which answer came, and how long the slowest took."""
    rng = random.Random(SEED)
    mutants = (mutant(rng) for _ in range(n))
    wrong: list[str] = []
    answers: Counter[str] = Counter()
    slowest = 0.0

    async def send_some() -> None:
        nonlocal slowest
        for sent in mutants:
            began = time.monotonic()
            try:
                if sent.whole:
                    answer = await asyncio.wait_for(exchange(server, sent.data), LONGEST)
                else:  # the server waits for the rest; its client gives up
                    answer = await asyncio.wait_for(exchange(server, sent.data), 0.2)
            except asyncio.TimeoutError:
                answer = b"HTTP/1.1 599 none in time\r\n\r\n" if sent.whole else b""
            slowest = max(slowest, time.monotonic() - began)
            answers[answer[9:12].decode() or "none"] += 1
            if problem := complaint(sent, answer) or address_in(answer):
                wrong.append(f"{problem}\n    {sent.name}\n    {sent.data[:600]!r}")

    await asyncio.gather(*(send_some() for _ in range(AT_ONCE)))
    return wrong, answers, slowest


async def text_of_a_normal_request(server: AppThread) -> str:
    status, _, body = parsed(await exchange(server, HEAD % len(NORMAL) + NORMAL))
    assert status == 200, body
    text: str = json.loads(body)["choices"][0]["text"]
    return text


async def weather(server: AppThread, n: int) -> None:
    """Sends `n` mutants, and checks what must be true before and after them."""
    before = await text_of_a_normal_request(server)
    wrong, answers, slowest = await storm(server, n)
    print(f"{n} mutants: {dict(answers)}, the slowest took {slowest:.2f} s")
    assert not wrong, f"{len(wrong)} of {n}:\n" + "\n".join(wrong[:20])
    assert answers["200"] > n / 20
    assert answers["400"] > n / 4
    for _ in range(200):
        stats = server.stats()
        if not (stats.running or stats.waiting):
            break
        await asyncio.sleep(0.02)
    assert (stats.running, stats.waiting, stats.kv_cells_used, stats.swapped_bytes) == (0, 0, 0, 0)
    assert stats.seq_ids_free + stats.prefixes_in_cells == stats.seq_ids
    assert await text_of_a_normal_request(server) == before


@cases(ring=500, soak=30_000)
@pytest.mark.timeout(1800)
async def test_thousands_of_mutated_requests_do_no_harm(server: AppThread, n_cases: int) -> None:
    await weather(server, n_cases)
