"""Several completions of one prompt: `n`, and the best `n` of `best_of`."""

from __future__ import annotations

from cppbatch.engine.params import SamplingParams, replaced
from cppbatch.engine.request import Completion, TokenLogprob
from cppbatch.errors import InvalidRequest


def n_candidates(n: int, best_of: int | None) -> int:
    """How many completions to generate for each prompt. Raises `InvalidRequest`."""
    if n < 1:
        raise InvalidRequest("n", f"is {n}; it must be at least 1")
    if best_of is not None and best_of < n:
        raise InvalidRequest("best_of", f"is {best_of}; it must be at least n, which is {n}")
    return best_of or n


def expand(params: list[SamplingParams], n: int, *, ranked: bool) -> list[SamplingParams]:
    """`n` copies of each, in order. `ranked`: with log-probabilities, which `likeliest` needs."""
    if ranked:
        params = [its if its.logprobs is not None else replaced(its, logprobs=0) for its in params]
    return [seeded(its, i) for its in params for i in range(n)]


def seeded(params: SamplingParams, i: int) -> SamplingParams:
    """The params of the i-th completion of a prompt: a given seed becomes seed + i, so that the texts differ and can
    be reproduced."""
    if i == 0 or params.seed is None or params.seed == -1:
        return params
    return replaced(params, seed=(params.seed + i) % 2**64)


def mean_logprob(logprobs: list[TokenLogprob], n_tokens: int) -> float:
    """The mean of the last `n_tokens` log-probabilities, which are those of the completion; 0 if there are none."""
    own = [entry.logprob or 0.0 for entry in logprobs[len(logprobs) - n_tokens :]]
    return sum(own) / len(own) if own else 0.0


def likeliest(completions: list[Completion], n: int, of: int) -> list[Completion]:
    """From each group of `of` completions the `n` with the highest mean log-probability, the best first."""

    def badness(completion: Completion) -> float:
        return -mean_logprob(completion.logprobs, completion.usage.completion_tokens)

    groups = [completions[i : i + of] for i in range(0, len(completions), of)]
    return [best for group in groups for best in sorted(group, key=badness)[:n]]
