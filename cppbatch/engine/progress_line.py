"""The line on stderr that shows how far `generate`, `chat`, `embed` and `map` are."""

from __future__ import annotations

from types import TracebackType

from cppbatch.engine.request import GenerationEvent


class ProgressLine:
    """Finished prompts, tokens, speed, and the time that is left. A context manager. `total`: None if not known."""

    def __init__(self, verb: str, total: int | None, *, enabled: bool) -> None:
        from rich.console import Console  # not in workers, which start faster without it
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[tokens]} tokens, {task.fields[speed]:.1f} tok/s"),
            TimeElapsedColumn(),
            TextColumn("left:"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            disable=not enabled,
        )
        self._task = self._progress.add_task(verb, total=total, start=False, tokens=0, speed=0.0)
        self._n_tokens = 0

    def __enter__(self) -> ProgressLine:
        self._progress.start()
        self._progress.start_task(self._task)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()

    def add(self, event: GenerationEvent) -> None:
        """Counts an event."""
        self._n_tokens += event.usage.prompt_tokens if event.embedding and event.usage else len(event.tokens)
        speed = self._n_tokens / (self._progress.tasks[0].elapsed or 1e9)
        has_ended = event.finish_reason is not None
        self._progress.update(self._task, advance=has_ended, tokens=self._n_tokens, speed=speed)

    def refused(self) -> None:
        """Counts a prompt that is refused."""
        self._progress.update(self._task, advance=1)
