"""The requests that every strategy gets: the same lengths, tokens and times of arrival."""

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
    """Seconds after the start."""
    prompt: list[int]
    n_new: int


class OfflineWorkload(msgspec.Struct, frozen=True, kw_only=True):
    """Raises `ConfigError` for sizes out of range."""

    n_requests: int = 48
    prompt_tokens: Lengths = Lengths(16, 256)
    new_tokens: Lengths = Lengths(16, 256)
    rate: float = 0.0
    """Requests a second, with exponential gaps (Poisson); 0: all at once."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.n_requests < 1:
            raise ConfigError(f"--requests is {self.n_requests}; it must be at least 1")
        self.prompt_tokens.check("--prompt-tokens")
        self.new_tokens.check("--new-tokens")
        if not 0 <= self.rate < float("inf"):
            raise ConfigError(f"--rate is {self.rate}; it must be 0 (all at once) or requests a second")
        if self.seed < 0:
            raise ConfigError(f"--seed is {self.seed}; it must be 0 or more")

    def jobs(self, n_vocab: int) -> list[TimedRequest]:
        """The requests in order of arrival; the same for the same workload and vocabulary.

        Lengths are log-uniform: half of them lie below the geometric mean of the ends, so a few are long.
        """
        draw, n = np.random.default_rng(self.seed), self.n_requests
        prompts, news = (_drawn(draw, of, n) for of in (self.prompt_tokens, self.new_tokens))
        gaps = draw.exponential(1 / self.rate, n) if self.rate else np.zeros(n)
        at = np.cumsum(gaps) - gaps[0]
        return [
            TimedRequest(float(at[i]), random_prompt(draw, prompts[i], n_vocab).tolist(), news[i]) for i in range(n)
        ]


def _drawn(draw: np.random.Generator, of: Lengths, n: int) -> list[int]:
    low, high = of
    lengths: list[int] = np.exp(draw.uniform(np.log(low), np.log(high + 1), n)).astype(int).clip(low, high).tolist()
    return lengths
