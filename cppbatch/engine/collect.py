"""Events of many requests, gathered into whole results in order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from cppbatch.engine.params import SamplingParams
from cppbatch.engine.request import Completion, GenerationEvent
from cppbatch.errors import InvalidRequest


def params_for_each(
    prompts: Sequence[object], params: SamplingParams | Sequence[SamplingParams] | None
) -> list[SamplingParams]:
    """One `SamplingParams` for each prompt. Raises `InvalidRequest` when the counts differ."""
    if isinstance(prompts, str):
        raise InvalidRequest("prompts", "is one string; give a list of prompts, like [prompt]")
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * len(prompts)
    if len(params) != len(prompts):
        raise InvalidRequest("params", f"has {len(params)} entries for {len(prompts)} prompts; give one or as many")
    return list(params)


def collect(ids: list[str], events: Iterable[GenerationEvent], *, progress: bool) -> list[Completion]:
    """Reads all events of these requests and returns their results in the order of `ids`."""
    parts: dict[str, list[GenerationEvent]] = {request_id: [] for request_id in ids}
    with _progress_line(enabled=progress) as line:
        task = line.add_task("generating", total=len(ids), tokens=0, speed=0.0)
        tokens = 0
        for event in events:
            parts[event.request_id].append(event)
            tokens += len(event.tokens)
            elapsed = line.tasks[task].elapsed
            line.update(task, advance=event.finish_reason is not None, tokens=tokens, speed=tokens / (elapsed or 1e9))
    return [_completion(parts[request_id]) for request_id in ids]


def _progress_line(*, enabled: bool) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[tokens]} tokens, {task.fields[speed]:.1f} tok/s"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        disable=not enabled,
    )


def _completion(events: list[GenerationEvent]) -> Completion:
    last = events[-1]
    assert last.finish_reason is not None
    assert last.usage is not None
    assert last.seed is not None
    return Completion(
        text="".join(event.text for event in events),
        tokens=[token for event in events for token in event.tokens],
        finish_reason=last.finish_reason,
        usage=last.usage,
        seed=last.seed,
        logprobs=[entry for event in events for entry in event.logprobs],
        error=last.error,
    )
