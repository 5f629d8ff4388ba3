#!/usr/bin/env python3
"""Attacks on a server, for scripts/bench_beside.py: what hostile clients send, again and again.

    python scripts/attacks.py NAME URL SECONDS

Prints "ready", waits for a line on stdin, repeats the attack for this time, and prints how often it completed.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp

Attack = Callable[[aiohttp.ClientSession, str], Awaitable[object]]


async def post(session: aiohttp.ClientSession, url: str, body: bytes, kind: str = "application/json") -> int:
    async with session.post(url, data=body, headers={"Content-Type": kind}) as answer:
        await answer.read()
        return answer.status


def encoded(**body: Any) -> bytes:
    return json.dumps(body).encode()


@functools.cache
def special_bodies() -> tuple[bytes, bytes]:
    prompt = encoded(prompt="<|im_start|>x" * 300_000, max_tokens=1)
    return prompt, encoded(messages=[{"role": "user", "content": "x"}] * 40_000, max_tokens=1)


@functools.cache
def large_bodies() -> tuple[tuple[str, bytes], ...]:
    user = {"role": "user", "content": "x"}
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    message = [{"role": "user", "content": "a"}]
    deep = b'{"messages":[{"role":"user","content":"a"}],"max_tokens":1,"tools":[{"type":"function","function":'
    deep += b'{"name":"f","parameters":' + b'{"a":' * 960 + b"1" + b"}" * 960 + b"}}]}"
    return (
        ("/v1/completions", encoded(prompt="a", logit_bias={str(i): 1 for i in range(1_000_000)}, max_tokens=1)),
        ("/v1/chat/completions", encoded(messages=[user] * 350_000, max_tokens=1)),
        ("/v1/chat/completions", encoded(messages=message, tools=[tool] * 180_000, max_tokens=1)),
        ("/v1/completions", encoded(prompt=[12] * 3_200_000, max_tokens=1)),
        ("/v1/completions", encoded(prompt="a", unknown=[[0]] * 2_000_000, max_tokens=1)),
        ("/v1/chat/completions", deep),
    )


NEXT_LARGE = itertools.cycle(range(6))


async def ids_out_of_range(session: aiohttp.ClientSession, url: str) -> None:
    huge = 2**64
    await post(session, f"{url}/v1/completions", encoded(prompt=[huge]))
    await post(session, f"{url}/generate", encoded(prompt="a", stop_token_ids=[huge], max_tokens=1))
    await post(session, f"{url}/detokenize", encoded(tokens=[huge]))
    await post(session, f"{url}/v1/embeddings", encoded(input=[huge]))


async def special_tokens(session: aiohttp.ClientSession, url: str) -> None:
    """Sends two prompts of megabytes of control tokens at once. The clients disconnect after 2 s."""
    prompt, chat = special_bodies()
    sends = [post(session, f"{url}/v1/completions", prompt), post(session, f"{url}/v1/chat/completions", chat)]
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(asyncio.gather(*sends, return_exceptions=True), 2)


async def endless_forms(session: aiohttp.ClientSession, url: str) -> None:
    """Sends a form of 10,000 empty parts, then one that continues for a second."""
    part = b"--x\r\nContent-Disposition: form-data; name=a\r\n\r\n\r\n"
    kind = "multipart/form-data; boundary=x"
    await post(session, f"{url}/v1/files", part * 10_000, kind)

    async def endless() -> AsyncIterator[bytes]:
        end = time.monotonic() + 1
        while time.monotonic() < end:
            yield part * 100
            await asyncio.sleep(0)

    with contextlib.suppress(aiohttp.ClientError):
        async with session.post(f"{url}/v1/files", data=endless(), headers={"Content-Type": kind}) as answer:
            await answer.read()


async def large_json(session: aiohttp.ClientSession, url: str) -> None:
    """Sends one of several bodies, in turn: 13 MB full of small values, or deeply nested."""
    path, body = large_bodies()[next(NEXT_LARGE)]
    await post(session, url + path, body)


async def slow_bodies(session: aiohttp.ClientSession, url: str) -> None:
    """Sends 200 requests with bodies of one byte per second."""

    async def slow() -> AsyncIterator[bytes]:
        for _ in range(600):
            yield b" "
            await asyncio.sleep(1)

    async def one() -> None:
        with contextlib.suppress(aiohttp.ClientError):
            async with session.post(f"{url}/v1/completions", data=slow()) as answer:
                await answer.read()

    await asyncio.gather(*(one() for _ in range(200)))


async def idle_connections(session: aiohttp.ClientSession, url: str) -> None:
    host, port = url.removeprefix("http://").split(":")
    connections = []
    for _ in range(20):
        connections += await asyncio.gather(*(asyncio.open_connection(host, int(port)) for _ in range(50)))
        await asyncio.sleep(0.2)
    for _, writer in connections:
        writer.close()


async def huge_schemas(session: aiohttp.ClientSession, url: str) -> None:
    """Sends schemas that are wide, that explode, and that are large."""
    wide = {"type": "object", "properties": {f"p{i}": {"enum": [f"v{j}" for j in range(20)]} for i in range(500)}}
    explosive = {"type": "array", "items": {"type": "integer", "multipleOf": 99999989}, "minItems": 100_000}
    pattern = {"type": "string", "pattern": "(a{1,500}b{1,500}){1,500}"}
    for schema in (wide, explosive, pattern):
        await post(session, f"{url}/generate", encoded(prompt="a", json_schema=schema, max_tokens=4))


async def cancelled_requests(session: aiohttp.ClientSession, url: str) -> None:
    """Sends 100 requests from clients that disconnect at once; over 10,000 in total."""
    host, port = url.removeprefix("http://").split(":")
    body = encoded(prompt="Hello, " * 50, max_tokens=100, stream=True)
    request = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)

    async def one() -> None:
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(request)
        await writer.drain()
        await asyncio.sleep(0.01)
        writer.close()

    await asyncio.gather(*(one() for _ in range(100)))


async def without_end(url: str, start: bytes, repeated: bytes) -> None:
    """Sends a request without an end on 4 connections, until the server closes them."""
    host, port = url.removeprefix("http://").split(":")

    async def one() -> None:
        reader, writer = await asyncio.open_connection(host, int(port))
        reading = asyncio.create_task(reader.read())  # so that answers do not delay the server
        try:
            writer.write(start)
            while True:
                writer.write(repeated)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            reading.cancel()
            writer.close()

    await asyncio.gather(*(one() for _ in range(4)))


CHUNKED = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"


async def chunks_of_one_byte(session: aiohttp.ClientSession, url: str) -> None:
    await without_end(url, CHUNKED, b"1\r\nx\r\n" * 10_000)


async def chunks_of_24_bytes(session: aiohttp.ClientSession, url: str) -> None:
    """The smallest that are not refused."""
    await without_end(url, CHUNKED, (b"18\r\n" + b" " * 24 + b"\r\n") * 2_000)


async def chunk_extensions(session: aiohttp.ClientSession, url: str) -> None:
    await without_end(url, CHUNKED, b"1;name=value\r\nx\r\n" * 4_000)


async def chunks_nobody_reads(session: aiohttp.ClientSession, url: str) -> None:
    await without_end(url, CHUNKED.replace(b"POST /v1/completions", b"GET /health"), b"1\r\nx\r\n" * 10_000)


async def pipelined_requests(session: aiohttp.ClientSession, url: str) -> None:
    await without_end(url, b"", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 1_000)


ATTACKS: dict[str, Attack] = {
    attack.__name__: attack
    for attack in (
        ids_out_of_range,
        special_tokens,
        endless_forms,
        large_json,
        slow_bodies,
        idle_connections,
        huge_schemas,
        cancelled_requests,
        chunks_of_one_byte,
        chunks_of_24_bytes,
        chunk_extensions,
        chunks_nobody_reads,
        pipelined_requests,
    )
}


async def repeat(attack: Attack, url: str, seconds: float) -> int:
    """Returns how often the attack completed within the time."""
    n, end = 0, time.monotonic() + seconds
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=60)) as session:
        while time.monotonic() < end:
            with contextlib.suppress(asyncio.TimeoutError, aiohttp.ClientError):
                await asyncio.wait_for(attack(session, url), max(0.1, end - time.monotonic()))
                n += 1
    return n


def main() -> None:
    name, url, seconds = sys.argv[1:]
    special_bodies(), large_bodies()
    print("ready", flush=True)
    sys.stdin.readline()
    print(asyncio.run(repeat(ATTACKS[name], url, float(seconds))))


if __name__ == "__main__":
    main()
