"""Events of many requests, gathered into whole results in order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from cppbatch.engine.embeddings import Vector, vector_of
from cppbatch.engine.params import SamplingParams, replaced
from cppbatch.engine.request import Completion, GenerationEvent, TokenLogprob
from cppbatch.errors import GenerationFailed, InvalidRequest


def params_for_each(
    prompts: Sequence[object], params: SamplingParams | Sequence[SamplingParams] | None
) -> list[SamplingParams]:
    """One `SamplingParams` for each prompt. Raises `InvalidRequest` when the counts differ."""
    if isinstance(prompts, str):
        raise InvalidRequest("prompts", "is one string; give a list of them, like [prompt]")
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * len(prompts)
    if len(params) != len(prompts):
        raise InvalidRequest("params", f"has {len(params)} entries for {len(prompts)} prompts; give one or as many")
    return list(params)


def n_candidates(n: int, best_of: int | None) -> int:
    """How many completions of each prompt have to be made for `n` of the best of so many. Raises `InvalidRequest`."""
    if n < 1:
        raise InvalidRequest("n", f"is {n}; it must be at least 1")
    if best_of is not None and best_of < n:
        raise InvalidRequest("best_of", f"is {best_of}, less than n, which is {n}")
    return best_of or n


def expand(params: list[SamplingParams], n: int, *, ranked: bool) -> list[SamplingParams]:
    """`n` for each, in order; `ranked`: with the log-probabilities by which they will be."""
    if ranked:
        params = [its if its.logprobs is not None else replaced(its, logprobs=0) for its in params]
    return [seeded(its, i) for its in params for i in range(n)]


def seeded(params: SamplingParams, i: int) -> SamplingParams:
    """The params of the i-th of several completions: given seeds count up, so that they differ and can be had again."""
    if i == 0 or params.seed is None or params.seed == -1:
        return params
    return replaced(params, seed=(params.seed + i) % 2**64)


def mean_logprob(logprobs: list[TokenLogprob], n_tokens: int) -> float:
    """The mean log-probability of a completion's `n_tokens`, the last ones of these; 0 if there are none."""
    own = [entry.logprob or 0.0 for entry in logprobs[len(logprobs) - n_tokens :]]
    return sum(own) / len(own) if own else 0.0


def likeliest(completions: list[Completion], n: int, of: int) -> list[Completion]:
    """Of each `of` completions in a row the `n` of the highest mean log-probability, the best first."""

    def badness(completion: Completion) -> float:
        return -mean_logprob(completion.logprobs, len(completion.tokens))

    groups = [completions[i : i + of] for i in range(0, len(completions), of)]
    return [best for group in groups for best in sorted(group, key=badness)[:n]]


def collect(ids: list[str], events: Iterable[GenerationEvent], *, progress: bool) -> list[Completion]:
    """Reads all events of these requests and returns their results in the order of `ids`."""
    parts = _gathered(ids, events, "generating", progress=progress)
    return [completion_of(parts[request_id]) for request_id in ids]


def collect_vectors(ids: list[str], events: Iterable[GenerationEvent], n_embd: int, *, progress: bool) -> Vector:
    """Reads all events of these embedding requests and returns their vectors in the order of `ids`.

    float32[len(ids), n_embd]. Raises `GenerationFailed` when one of them has none.
    """
    parts = _gathered(ids, events, "embedding", progress=progress)
    vectors = np.empty((len(ids), n_embd), np.float32)
    for i, request_id in enumerate(ids):
        last = parts[request_id][-1]
        if last.embedding is None:
            assert last.finish_reason is not None
            raise GenerationFailed(f"texts[{i}] has no vector: {last.error or last.finish_reason.value}")
        vectors[i] = vector_of(last.embedding)
    return vectors


def _gathered(
    ids: list[str], events: Iterable[GenerationEvent], what: str, *, progress: bool
) -> dict[str, list[GenerationEvent]]:
    """The events of each request, with a line that shows how far they are."""
    parts: dict[str, list[GenerationEvent]] = {request_id: [] for request_id in ids}
    with _progress_line(enabled=progress) as line:
        task = line.add_task(what, total=len(ids), tokens=0, speed=0.0)
        tokens = 0
        for event in events:
            parts[event.request_id].append(event)
            tokens += event.usage.prompt_tokens if event.embedding and event.usage else len(event.tokens)
            elapsed = line.tasks[task].elapsed
            line.update(task, advance=event.finish_reason is not None, tokens=tokens, speed=tokens / (elapsed or 1e9))
    return parts


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


def completion_of(events: list[GenerationEvent]) -> Completion:
    """All events of a request that has ended, as one result."""
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
