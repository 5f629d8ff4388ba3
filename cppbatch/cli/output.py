"""Output of commands: a progress bar while a model loads, numbers of weights, file sizes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def loading_bar(fraction: Callable[[], float]) -> Iterator[None]:
    """Shows loading progress on stderr, if it is a terminal. `fraction`: 0.0 to 1.0, polled ten times a second."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    ended = threading.Event()
    columns = (TextColumn("loading"), BarColumn(), TaskProgressColumn(), TextColumn("left:"), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=1.0)

        def follow() -> None:
            while not ended.wait(0.1):
                bar.update(task, completed=fraction())

        follower = threading.Thread(target=follow, name="cppbatch-loading", daemon=True)
        follower.start()
        try:
            yield
        finally:
            ended.set()
            follower.join()


def format_count(n: int) -> str:
    """A number of weights: 135M, 8.0B."""
    if n < 10**6:
        return f"{n:,}"
    return f"{n / 1e9:.1f}B" if n >= 10**9 else f"{n / 1e6:.0f}M"


def format_bytes(n_bytes: int) -> str:
    """The size of a file: 98.4 MB, 4.92 GB."""
    return f"{n_bytes / 1e9:.2f} GB" if n_bytes >= 1e9 else f"{n_bytes / 1e6:.1f} MB"
