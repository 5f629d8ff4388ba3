"""The requests of a strategy comparison: the same lengths, tokens and arrival times for every strategy."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np

from cppbatch.bench.prompts import Lengths, random_prompt
from cppbatch.errors import ConfigError


@dataclass(frozen=True)
class TimedRequest:
    """One request."""

    at: float
    """Arrival in seconds after the start."""
    prompt: list[int]
    n_new: int


class OfflineWorkload(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers and sizes of requests. Raises `ConfigError` if they are out of range."""

    n_requests: int = 48
    prompt_tokens: Lengths = Lengths(16, 256)
    new_tokens: Lengths = Lengths(16, 256)
    rate: float = 0.0
    """Requests/s with exponential gaps (a Poisson process); 0: all at once."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.n_requests < 1:
            raise ConfigError(f"--requests is {self.n_requests}; it must be at least 1")
        self.prompt_tokens.check("--prompt-tokens")
        self.new_tokens.check("--new-tokens")
        if not 0 <= self.rate < float("inf"):
            raise ConfigError(f"--rate is {self.rate}; it must be 0 (all at once) or a number of requests per second")
        if self.seed < 0:
            raise ConfigError(f"--seed is {self.seed}; it must be 0 or more")

    def requests(self, n_vocab: int) -> list[TimedRequest]:
        """Returns the requests in order of arrival, always the same for a workload and vocabulary.

        Lengths are log-uniform: half of them are below the geometric mean of the range, and a few are long.
        """
        draw, n = np.random.default_rng(self.seed), self.n_requests
        prompts, news = (_random_lengths(draw, lengths, n) for lengths in (self.prompt_tokens, self.new_tokens))
        gaps = draw.exponential(1 / self.rate, n) if self.rate else np.zeros(n)
        at = np.cumsum(gaps) - gaps[0]
        return [
            TimedRequest(float(at[i]), random_prompt(draw, prompts[i], n_vocab).tolist(), news[i]) for i in range(n)
        ]


def _random_lengths(draw: np.random.Generator, lengths: Lengths, n: int) -> list[int]:
    low, high = lengths
    values: list[int] = np.exp(draw.uniform(np.log(low), np.log(high + 1), n)).astype(int).clip(low, high).tolist()
    return values
