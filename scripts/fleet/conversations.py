"""The load of a fleet: conversations that start in bursts over a day, with system prompts in common."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np
import numpy.typing as npt

from cppbatch.engine.params import SamplingParams
from cppbatch.engine.request import GenerationRequest

Tokens = npt.NDArray[np.int32]
_N_DAY_POINTS = 4096
_PARAMS = SamplingParams(temperature=0)


class SimulatedRequest:
    """One turn of a conversation: its prompt is that of the turn before, its output, and what the user wrote then."""

    __slots__ = (
        "admitted_at", "arrived_at", "conversation", "finished_at", "first_token_at", "id", "n_cached", "n_generated",
        "n_output", "n_prompt", "n_system", "output", "prompt", "replica", "request", "system", "turn",
    )  # fmt: skip

    def __init__(self, conversation: int, turn: int, prompt: Tokens, output: Tokens, *, n_system: int = 0) -> None:
        """`prompt`, `output`: token ids; the output is what the engine will generate. `n_system`: tokens of the system
        prompt, with which the prompt starts."""
        self.conversation, self.turn, self.n_system = conversation, turn, n_system
        self.id = f"{conversation}.{turn}"
        self.prompt, self.output = prompt, output.tolist()
        self.n_prompt, self.n_output = len(prompt), len(output)
        self.system = hash(prompt[:n_system].tobytes())
        self.request = GenerationRequest(id=self.id, prompt=prompt.tolist(), params=_PARAMS)
        self.replica = -1
        self.n_generated = 0
        self.n_cached = 0
        """Prompt tokens taken from the prefix cache."""
        self.arrived_at = self.admitted_at = self.first_token_at = self.finished_at = -1.0

    def forget_tokens(self) -> None:
        """Keeps only counts and times of an ended request, because a simulation may have a million."""
        del self.prompt, self.output, self.request

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.first_token_at - self.arrived_at


class LogNormal(msgspec.Struct, frozen=True):
    """A distribution by its median and the standard deviation of the logarithm."""

    median: float
    sigma: float

    def draw(self, rng: np.random.Generator) -> float:
        return float(self.median * np.exp(self.sigma * rng.standard_normal()))


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What users do. The lengths are those of Azure's conversation trace of 2023 (docs/scale.md)."""

    rate: float
    """Requests a second, in the mean over the day."""
    seconds: float
    """No request arrives after this time."""
    seed: int = 0
    burstiness: float = 2.0
    """Standard deviation by mean of the gaps between conversations; 1: a Poisson process."""
    day_s: float = 0.0
    """Length of a day; 0: the rate is constant."""
    day_swing: float = 0.6
    """The rate at noon is 1 + this times the mean, at midnight 1 - this."""
    n_apps: int = 100
    """System prompts; the k-th most popular is used in proportion to 1 / k ** zipf."""
    zipf: float = 1.0
    system_tokens: LogNormal = LogNormal(400, 0.8)
    user_tokens: LogNormal = LogNormal(150, 1.0)
    output_tokens: LogNormal = LogNormal(129, 0.86)
    turns: float = 3.0
    """Requests of a conversation in the mean: after each, another one follows with the same probability."""
    think_s: LogNormal = LogNormal(15, 0.8)
    """From the end of an answer to the user's next request."""
    max_tokens: int = 4096
    """A conversation ends if its next request would be longer."""
    n_vocab: int = 32000


class Conversation:
    """One user's conversation. Its random numbers are its own, so they do not depend on what the fleet does."""

    def __init__(self, load: Load, number: int, system: Tokens) -> None:
        self._load, self._number = load, number
        self._rng = np.random.default_rng((load.seed, 1, number))
        self._history, self._n_system = system, len(system)
        self._turn = 0

    def next_request(self) -> SimulatedRequest | None:
        """The next request; None if the conversation is over."""
        load, rng = self._load, self._rng
        if self._turn and rng.random() >= 1 - 1 / load.turns:
            return None
        n_user, n_output = max(1, round(load.user_tokens.draw(rng))), max(1, round(load.output_tokens.draw(rng)))
        prompt = np.concatenate([self._history, _tokens(rng, load, n_user)])
        if len(prompt) + n_output > load.max_tokens:
            return None
        output = _tokens(rng, load, n_output)
        request = SimulatedRequest(self._number, self._turn, prompt, output, n_system=self._n_system)
        self._history = np.concatenate([prompt, output])
        self._turn += 1
        return request

    def answered(self, output: list[int]) -> None:
        """The model gave a different answer than planned: the next request continues it."""
        self._history = np.concatenate([self._history[: -len(output)], np.array(output, np.int32)])

    def think_s(self) -> float:
        """Seconds until the user's next request."""
        return self._load.think_s.draw(self._rng)


def conversations(load: Load) -> Iterator[tuple[float, Conversation]]:
    """Conversations with their start times, ascending.

    The gaps are those of a Gamma process in time that runs as fast as the rate of the day.
    """
    rng = np.random.default_rng((load.seed, 0))
    systems = [_tokens(rng, load, max(1, round(load.system_tokens.draw(rng)))) for _ in range(load.n_apps)]
    systems = [system[: load.max_tokens // 2] for system in systems]
    shares = 1 / np.arange(1, load.n_apps + 1) ** load.zipf
    cumulative = np.cumsum(shares / shares.sum())
    times, expected = _day(load)
    shape = 1 / load.burstiness**2
    number, at = 0, 0.0
    while True:
        at += rng.gamma(shape, 1 / shape)
        if at >= expected[-1]:
            return
        app = int(np.searchsorted(cumulative, rng.random()))
        yield float(np.interp(at, expected, times)), Conversation(load, number, systems[min(app, load.n_apps - 1)])
        number += 1


def rate_at(load: Load, seconds: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Expected requests per second at these times; a day starts at midnight."""
    if not load.day_s:
        return np.full_like(seconds, load.rate)
    return load.rate * (1 - load.day_swing * np.cos(2 * np.pi * seconds / load.day_s))


def _day(load: Load) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Times, and how many conversations are expected to have begun by then."""
    times = np.linspace(0, load.seconds, _N_DAY_POINTS)
    rates = rate_at(load, times) / load.turns
    steps = (rates[1:] + rates[:-1]) / 2 * np.diff(times)
    return times, np.concatenate([[0.0], np.cumsum(steps)])


def _tokens(rng: np.random.Generator, load: Load, n: int) -> Tokens:
    return rng.integers(0, load.n_vocab, n, np.int32)
