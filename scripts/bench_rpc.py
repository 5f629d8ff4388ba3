"""Measures one model split over two RPC workers of this machine: speed, texts, and bytes on the wire for a token.

    .venv/bin/python scripts/bench_rpc.py [MODEL.gguf] [-np 16] [--new 64] [--threads 1] [--turns 3]

Prints Markdown. Every row writes the same 16 texts. Bytes are counted by a proxy in runs of their own, which do not
count for speed. `--delay-ms` adds a delay to each piece of data from an engine, as a network does.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import re
import statistics
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from cppbatch import BatchInferenceEngine, SamplingParams
from cppbatch.models.pull import pull_default
from cppbatch.sizing.child_process import ChildProcess

PROMPTS = [
    f"Write the story of the {i}. day of a journey to {place}:"
    for i, place in enumerate(
        "Rome Oslo Lima Cairo Delhi Tokyo Paris Quito Accra Hanoi Sofia Minsk Tunis Dakar Malta Riga".split()
    )
]


@contextlib.contextmanager
def rpc_worker(threads: int) -> Iterator[int]:
    """`cppbatch rpc-worker` on a free port, which it yields."""
    with ChildProcess([sys.executable, "-m", "cppbatch", "rpc-worker", "--port", "0", "-t", str(threads)]) as process:
        while not (ready := re.search(r"^serving .*:(\d+)$", process.output(), re.MULTILINE)):
            if process.wait(0.1) is not None:
                sys.exit(f"the RPC worker does not start: {process.output()}")
        yield int(ready[1])


class CountingProxy:
    """Passes connections on to a port, and counts their bytes. A context manager."""

    def __init__(self, port: int, delay_s: float = 0.0) -> None:
        self.n_sent = self.n_received = 0
        self._target, self._delay_s = port, delay_s
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> CountingProxy:
        self._thread.start()
        started = asyncio.run_coroutine_threadsafe(asyncio.start_server(self._connect, "127.0.0.1", 0), self._loop)
        self._server = started.result()
        self.port: int = self._server.sockets[0].getsockname()[1]
        return self

    def __exit__(self, *exc: object) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _close(self) -> None:
        """Closes the connections too: the worker serves no other client until then."""
        self._server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection("127.0.0.1", self._target)
        sending = self._pass_on(reader, there[1], sent=True)
        await asyncio.gather(sending, self._pass_on(there[0], writer, sent=False))

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, sent: bool) -> None:
        try:
            while data := await reader.read(1 << 20):
                if sent:
                    self.n_sent += len(data)
                    await asyncio.sleep(self._delay_s)
                else:
                    self.n_received += len(data)
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()


def texts_and_speed(engine: BatchInferenceEngine, prompts: Sequence[str], n_new: int) -> tuple[list[list[int]], float]:
    """The tokens of all texts, and how many a second."""
    began = perf_counter()
    done = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=n_new, ignore_eos=True))
    return [each.tokens for each in done], len(prompts) * n_new / (perf_counter() - began)


@contextlib.contextmanager
def counting(ports: Sequence[int], delay_ms: float) -> Iterator[list[CountingProxy]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(CountingProxy(port, delay_ms / 1e3)) for port in ports]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("-np", type=int, default=16, dest="n_parallel")
    parser.add_argument("--new", type=int, default=64, help="tokens of each text")
    parser.add_argument("--threads", type=int, default=1, help="of each worker")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--delay-ms", type=float, default=0.0)
    options = parser.parse_args()
    model = options.model or pull_default()
    n = options.n_parallel
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(n)]
    settings: dict[str, Any] = {"n_ctx": 256 * n, "n_parallel": n, "prefix_cache": False}
    with rpc_worker(options.threads) as one, rpc_worker(options.threads) as two:
        split: dict[str, Any] = {"tensor_split": (1.0, 1.0)}
        direct = (f"127.0.0.1:{one}", f"127.0.0.1:{two}")
        variants: dict[str, dict[str, Any]] = {
            "one process": {"spec": "off"},
            "two workers": {**split, "spec": "off"},
            "two workers, `--sampling host`": {**split, "spec": "off", "sampling": "host"},
            "two workers, `--sampling host --spec suffix`": {**split, "spec": "suffix", "sampling": "host"},
        }
        speeds: dict[str, list[float]] = {name: [] for name in variants}
        expected: list[list[int]] = []
        same: dict[str, int] = {}
        kilobytes = dict.fromkeys(variants, "")
        for turn in range(options.turns):
            for name, variant in variants.items():
                rpc: dict[str, Any] = {"rpc": direct} if "tensor_split" in variant else {}
                with contextlib.ExitStack() as stack:
                    if rpc and options.delay_ms:
                        proxies = stack.enter_context(counting((one, two), options.delay_ms))
                        rpc = {"rpc": tuple(f"127.0.0.1:{proxy.port}" for proxy in proxies)}
                    engine = stack.enter_context(BatchInferenceEngine(model, **settings, **variant, **rpc))
                    texts_and_speed(engine, prompts[:2], 8)
                    tokens, speed = texts_and_speed(engine, prompts, options.new)
                speeds[name].append(speed)
                expected = expected or tokens
                same[name] = sum(a == b for a, b in zip(tokens, expected, strict=True))
                if turn == 0 and rpc:
                    kilobytes[name] = wire(model, (one, two), {**settings, **variant}, prompts, options.new)
    what = f"{model.stem}, B={n}, {options.new} new tokens each"
    print(f"| {what} | tokens/s | same texts | KiB a token, sent + received |")
    print("|---|---|---|---|")
    for name in variants:
        print(f"| {name} | {statistics.median(speeds[name]):.0f} | {same[name]} of {n} | {kilobytes[name]} |")


def wire(model: Path, ports: Sequence[int], settings: dict[str, Any], prompts: Sequence[str], n_new: int) -> str:
    """KiB for each new token, in both directions, prompts included; loading is not."""
    with counting(ports, 0.0) as proxies:
        rpc = tuple(f"127.0.0.1:{proxy.port}" for proxy in proxies)
        with BatchInferenceEngine(model, **settings, rpc=rpc) as engine:
            texts_and_speed(engine, prompts[:2], 8)
            before = [(proxy.n_sent, proxy.n_received) for proxy in proxies]
            texts_and_speed(engine, prompts, n_new)
            after = [(proxy.n_sent, proxy.n_received) for proxy in proxies]
    sent, received = (sum(b[i] - a[i] for a, b in zip(before, after, strict=True)) for i in (0, 1))
    n_tokens = len(prompts) * n_new * 1024
    return f"{sent / n_tokens:.1f} + {received / n_tokens:.1f}"


if __name__ == "__main__":
    main()
