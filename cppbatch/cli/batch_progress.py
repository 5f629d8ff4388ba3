"""How far a batch job is: a live bar on a terminal, a line a minute elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from cppbatch.server.batches.offline import OfflineJob

_LOOK_S = 0.25
_LOOKS = 20  # of which the speed is a mean
_LINE_EVERY_S = 60.0


class BatchProgress:
    """Watches a job from a thread. A context manager."""

    def __init__(self, job: OfflineJob) -> None:
        self._job = job
        self._began = 0.0
        self._looks: deque[tuple[float, int]] = deque(maxlen=_LOOKS)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="cppbatch-progress", daemon=True)

    def __enter__(self) -> BatchProgress:
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def start(self) -> None:
        """The model is there: the clock runs."""
        self._began = time.perf_counter()
        self._thread.start()

    def speed(self) -> str:
        """Tokens generated since the start, and how fast."""
        seconds = time.perf_counter() - self._began if self._began else 0.0
        rate = f" in {seconds:.0f} s, {self._job.n_tokens / seconds:.0f} tokens/s" if seconds else ""
        return f"{self._job.n_tokens} tokens{rate}"

    def _watch(self) -> None:
        if sys.stderr.isatty():
            self._show_bar()
        else:
            while not self._ended.wait(_LINE_EVERY_S):
                click.echo(f"{self._counts()} of {self._job.n_lines}; {self.speed()}", err=True)

    def _counts(self) -> str:
        journal = self._job.journal
        return f"{journal.n_completed} done, {journal.n_failed} failed"

    def _show_bar(self) -> None:
        columns = (
            BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn(),
            TextColumn("left:"), TimeRemainingColumn(),
        )  # fmt: skip
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task("")
            while True:
                has_ended = self._ended.wait(_LOOK_S)
                job = self._job
                said = (
                    f"done, {job.journal.n_failed} failed, {self._recent_speed():.0f} tokens/s, batch {job.n_running}"
                )
                n_ended = job.journal.n_completed + job.journal.n_failed
                bar.update(task, completed=n_ended, total=job.n_lines, description=said)
                if has_ended:
                    return

    def _recent_speed(self) -> float:
        """Tokens per second over the last few seconds."""
        self._looks.append((time.perf_counter(), self._job.n_tokens))
        (then, before), (now, tokens) = self._looks[0], self._looks[-1]
        return (tokens - before) / (now - then) if now > then else 0.0
