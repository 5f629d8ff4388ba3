#!/usr/bin/env python3
"""What open pages cost: tokens/s of `cppbatch bench serve` without pages, and beside pages in browsers, alternately.

Each turn measures a server in every state, in changing order: alone, beside 5 programs that read GET /live, beside 5
browsers with an idle page (the Chat tab), and beside 5 browsers with the Live tab. The ratio is the median of the
turns' ratios to the server alone.

Browsers run elsewhere as a rule. Here they share the cores with the engine, which uses all of them, so they run at the
lowest priority (nice 19): what they draw takes time that the engine leaves, and the ratio is the cost of serving them.
--nice 0 lets them compete. The CPU seconds that the browsers get and that the server needs, per second, are shown too.

    .venv/bin/python scripts/bench_page.py [-m model.gguf] [--pages 5] [--turns 5] [--requests 32]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

from cppbatch.bench.report import markdown_table, read_report
from cppbatch.errors import UnusableServer
from cppbatch.models.pull import choose_model
from cppbatch.sizing.child_process import RunningServer, run_with_timeout, running_server
from tests.browser.chromium import find_chromium

CPPBATCH = [sys.executable, "-m", "cppbatch"]
ALONE, READERS, IDLE, LIVE = "alone", "readers of /live", "browsers, idle page", "browsers, Live tab"
STATES = [ALONE, READERS, IDLE, LIVE]
LIMIT_S = 300


@dataclass(frozen=True)
class Measured:
    """A server in one state and turn. CPU: seconds of all processes per second."""

    tokens_per_second: float
    inter_token_p95: float
    server_cpu: float
    browser_cpu: float


def main() -> None:
    args = _arguments()
    turns: dict[str, list[Measured]] = {state: [] for state in STATES}
    with contextlib.ExitStack() as stack:
        data = stack.enter_context(tempfile.TemporaryDirectory())
        # Without drafts: how many of them are accepted differs from text to text.
        flags: list[str | Path] = ["-m", choose_model(args.model), "--spec", "off", "--data-dir", data]
        server = stack.enter_context(running_server([*CPPBATCH, "serve", *flags]))
        browsers = Browsers(stack.enter_context(_playwright()), args.pages, args.nice)
        bench_serve(server.url, requests=16, seed=1)  # warm-up
        for turn in range(args.turns):
            for i in range(len(STATES)):
                state = STATES[(i + turn) % len(STATES)]
                turns[state].append(measure(server, state, browsers, args, seed=100 * turn + i + 2))
                print(f"turn {turn + 1}, {state}: {turns[state][-1]}", file=sys.stderr, flush=True)
    nice = f"nice {args.nice}"
    print(
        f"{args.pages} pages ({nice}), {args.requests} requests of {args.tokens} tokens, 16 at once; {args.turns} turns"
    )
    print(table(turns))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model")
    parser.add_argument("--pages", type=int, default=5)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=96, help="of each output")
    parser.add_argument("--nice", type=int, default=19, help="of the browsers")
    return parser.parse_args()


def measure(server: RunningServer, state: str, browsers: Browsers, args: argparse.Namespace, seed: int) -> Measured:
    """Puts the load on the server in this state."""
    with contextlib.ExitStack() as stack:
        if state == READERS:
            stack.enter_context(readers(server.url, args.pages))
        elif state in (IDLE, LIVE):
            stack.enter_context(browsers.showing(f"{server.url}/#{'live' if state == LIVE else 'chat'}"))
        began, server_before, browser_before = time.monotonic(), cpu_seconds(server.process.pid), browsers.cpu_seconds()
        speed, gap = bench_serve(server.url, requests=args.requests, seed=seed, tokens=args.tokens)
        took = time.monotonic() - began
        return Measured(
            speed,
            gap,
            (cpu_seconds(server.process.pid) - server_before) / took,
            (browsers.cpu_seconds() - browser_before) / took,
        )


def bench_serve(url: str, *, requests: int, seed: int, tokens: int = 32) -> tuple[float, float]:
    """Returns output tokens/s and the 95th percentile of the time between tokens, in ms."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "report.json")
        load = ["--workload", "fixed", "--prompt-tokens", 64, "--output-tokens", tokens, "--warmup", 0, "--repeats", 1]
        size = ["--requests", requests, "--seed", seed, "--json", file]
        done = run_with_timeout([*CPPBATCH, *map(str, ["bench", "serve", "--url", url, *load, *size])], LIMIT_S)
        if done.failure:
            raise UnusableServer(f"cppbatch bench serve: {done.failure}\n{done.output[-2000:]}")
        row = read_report(file).rows[0]
        return row["output_tokens_per_second"].median, row["inter_token_ms_p95"].median


@contextlib.contextmanager
def readers(url: str, n: int) -> Iterator[None]:
    """Connections that read GET /live and do nothing with it."""
    answers = [urllib.request.urlopen(f"{url}/live", timeout=30) for _ in range(n)]

    def read(answer: Any) -> None:
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed below
            while answer.read1(1 << 16):
                pass

    threads = [threading.Thread(target=read, args=[answer], daemon=True) for answer in answers]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for answer in answers:
            answer.close()


class Browsers:
    """Browsers with a low priority, each with its own process tree."""

    def __init__(self, playwright: Any, n: int, nice: int) -> None:
        self._playwright, self._n, self._nice = playwright, n, nice

    @contextlib.contextmanager
    def showing(self, url: str) -> Iterator[None]:
        """Opens the browsers with this page. They are closed at the end."""
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
            program = Path(folder, "chromium")
            # Linux schedules sessions before processes where autogroups are on, so the session needs the priority too.
            program.write_text(
                f"#!/bin/sh\n{{ echo {self._nice} > /proc/self/autogroup; }} 2>/dev/null\n"
                f'exec nice -n {self._nice} "{find_chromium()}" "$@"\n'
            )
            program.chmod(0o755)
            for _ in range(self._n):
                browser = self._playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
                stack.callback(browser.close)
                page = browser.new_page(viewport={"width": 1280, "height": 800})
                page.goto(url)
                page.locator("main > section:visible *").first.wait_for(state="attached")
            yield

    def cpu_seconds(self) -> float:
        """Of all processes that Playwright has started; 0 without browsers."""
        return cpu_seconds(os.getpid(), "chrom")


def cpu_seconds(pid: int, name: str = "") -> float:
    """CPU time of the process's descendants (and its own, without a `name` that theirs must contain)."""
    process, total = psutil.Process(pid), 0.0
    for each in [*([] if name else [process]), *process.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            if name in each.name():
                times = each.cpu_times()
                total += times.user + times.system
    return total


@contextlib.contextmanager
def _playwright() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        yield playwright


def table(turns: dict[str, list[Measured]]) -> str:
    """Returns a row for each state: medians, and the median of the turns' ratios to the server alone."""
    rows = []
    for state, measured in turns.items():
        ratios = [a.tokens_per_second / b.tokens_per_second for a, b in zip(measured, turns[ALONE], strict=True)]
        rows.append([
            state,
            f"{median(m.tokens_per_second for m in measured):.1f}",
            f"{median(ratios):.1%} ({min(ratios):.1%} to {max(ratios):.1%})",
            f"{median(m.inter_token_p95 for m in measured):.1f}",
            f"{median(m.server_cpu for m in measured):.2f}",
            f"{median(m.browser_cpu for m in measured):.2f}",
        ])  # fmt: skip
    head = ["", "tokens/s", "of alone", "inter-token p95, ms", "server CPU", "browsers CPU"]
    return markdown_table(head, rows)


if __name__ == "__main__":
    main()
