"""A bar in the terminal while a model is loaded."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

_INTERVAL_S = 0.1


@contextlib.contextmanager
def loading_bar(fraction: Callable[[], float]) -> Iterator[None]:
    """Shows on stderr, if that is a terminal, how much is loaded. `fraction`: 0.0 to 1.0, asked ten times a second."""
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
            while not ended.wait(_INTERVAL_S):
                bar.update(task, completed=fraction())

        follower = threading.Thread(target=follow, name="cppbatch-loading", daemon=True)
        follower.start()
        try:
            yield
        finally:
            ended.set()
            follower.join()
