#!/usr/bin/env python3
"""Measures one model split over two RPC workers of this machine: speed, texts, and bytes on the wire for a token.

    .venv/bin/python scripts/bench_rpc.py [-m MODEL.gguf] [-np 16] [--new 64] [--threads 1] [--turns 3]

Every row writes the same texts. Bytes are counted by a proxy in runs of their own, which do not count for speed.
--delay-ms adds a delay to each piece of data from an engine, as a network does.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import re
import sys
import threading
from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import Any

from measuring import Comparison, script_arguments
from server_process import ChildProcess

from cppbatch import BatchInferenceEngine, SamplingParams
from cppbatch.bench.report import Column
from cppbatch.models.pull import choose_model

PLACES = "Rome Oslo Lima Cairo Delhi Tokyo Paris Quito Accra Hanoi Sofia Minsk Tunis Dakar Malta Riga".split()
PROMPTS = [f"Write the story of the {i}. day of a journey to {place}:" for i, place in enumerate(PLACES)]
SPLIT: dict[str, Any] = {"tensor_split": (1.0, 1.0)}
VARIANTS: dict[str, dict[str, Any]] = {
    "one process": {"spec": "off"},
    "two workers": {**SPLIT, "spec": "off"},
    "two workers, `--sampling host`": {**SPLIT, "spec": "off", "sampling": "host"},
    "two workers, `--sampling host --spec suffix`": {**SPLIT, "spec": "suffix", "sampling": "host"},
}
COLUMNS = [
    Column("tokens_per_second", "tokens/s", 0), Column("same", "same texts", 0),
    Column("sent", "KiB a token, sent"), Column("received", "received"),
]  # fmt: skip


@contextlib.contextmanager
def rpc_worker(threads: int) -> Iterator[int]:
    """Runs `cppbatch rpc-worker` on a free port, which it yields."""
    with ChildProcess([sys.executable, "-m", "cppbatch", "rpc-worker", "--port", "0", "-t", str(threads)]) as process:
        while not (ready := re.search(r"^serving .*:(\d+)$", process.output(), re.MULTILINE)):
            if process.wait(0.1) is not None:
                sys.exit(f"the RPC worker does not start: {process.output()}")
        yield int(ready[1])


class CountingProxy:
    """Passes connections on to a port, and counts their bytes. A context manager."""

    def __init__(self, port: int, delay_s: float) -> None:
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
        with contextlib.suppress(ConnectionError), contextlib.closing(writer):
            while data := await reader.read(1 << 20):
                if sent:
                    self.n_sent += len(data)
                    await asyncio.sleep(self._delay_s)
                else:
                    self.n_received += len(data)
                writer.write(data)
                await writer.drain()


class Texts:
    """Writes the texts with one variant after the other."""

    def __init__(self, args: argparse.Namespace, ports: Sequence[int]) -> None:
        self._args, self._ports, self._model = args, ports, choose_model(args.model)
        self._prompts = [PROMPTS[i % len(PROMPTS)] for i in range(args.n_parallel)]
        self._expected: list[list[int]] = []

    def measure(self, name: str, turn: int) -> dict[str, float | None]:
        """Returns tokens/s and equal texts; in the first turn also the KiB for each new token, prompts included."""
        is_split = "tensor_split" in VARIANTS[name]
        found: dict[str, float | None] = {}
        if is_split and turn == 0:
            with self._proxies(0.0) as proxies:
                _, _, before = self._write(name, [proxy.port for proxy in proxies], proxies)
                n = len(self._prompts) * self._args.new * 1024
                found["sent"] = (sum(proxy.n_sent for proxy in proxies) - before[0]) / n
                found["received"] = (sum(proxy.n_received for proxy in proxies) - before[1]) / n
        if is_split and self._args.delay_ms:
            with self._proxies(self._args.delay_ms / 1e3) as proxies:
                tokens, seconds, _ = self._write(name, [proxy.port for proxy in proxies])
        else:
            tokens, seconds, _ = self._write(name, self._ports if is_split else ())
        self._expected = self._expected or tokens
        same = sum(one == other for one, other in zip(tokens, self._expected, strict=True))
        return {"tokens_per_second": sum(map(len, tokens)) / seconds, "same": same, **found}

    @contextlib.contextmanager
    def _proxies(self, delay_s: float) -> Iterator[list[CountingProxy]]:
        with contextlib.ExitStack() as stack:
            yield [stack.enter_context(CountingProxy(port, delay_s)) for port in self._ports]

    def _write(
        self, name: str, ports: Sequence[int], proxies: Sequence[CountingProxy] = ()
    ) -> tuple[list[list[int]], float, tuple[int, int]]:
        """Returns the tokens, the seconds, and the bytes until then: loading and a warm-up do not count."""
        n = self._args.n_parallel
        settings = {"n_ctx": 256 * n, "n_parallel": n, "prefix_cache": False, **VARIANTS[name]}
        settings["rpc"] = tuple(f"127.0.0.1:{port}" for port in ports)
        with BatchInferenceEngine(self._model, **settings) as engine:
            params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
            engine.generate(self._prompts[:2], params)
            counts = sum(proxy.n_sent for proxy in proxies), sum(proxy.n_received for proxy in proxies)
            began = perf_counter()
            done = engine.generate(
                self._prompts, SamplingParams(temperature=0, max_tokens=self._args.new, ignore_eos=True)
            )
            return [each.tokens for each in done], perf_counter() - began, counts


def main() -> None:
    """Prints a row for each variant."""
    parser = script_arguments(__doc__, turns=3)
    parser.add_argument("-np", type=int, default=16, dest="n_parallel")
    parser.add_argument("--new", type=int, default=64, help="tokens of each text")
    parser.add_argument("--threads", type=int, default=1, help="of each worker")
    parser.add_argument("--delay-ms", type=float, default=0.0)
    args = parser.parse_args()
    with rpc_worker(args.threads) as one, rpc_worker(args.threads) as other:
        found = Comparison(VARIANTS).measure(args.turns, Texts(args, (one, other)).measure)
    print(found.table(COLUMNS, {"tokens_per_second": "of one process"}))


if __name__ == "__main__":
    main()
