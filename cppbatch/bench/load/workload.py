"""The requests of a load test, and how they are sent."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any, Literal

import msgspec

from cppbatch.bench.prompts import Lengths, check_least, random_text
from cppbatch.bench.text_workloads import TEXT_WORKLOADS
from cppbatch.errors import ConfigError

Kind = Literal["mixed", "fixed", "shared-prefix", "fan-out", "quote", "json", "code", "job", "free"]
SamplesBy = Literal["requests", "n"]
Endpoint = Literal["completions", "chat"]


SIZES = {
    "mixed": (Lengths(32, 512), Lengths(16, 128)),
    "fixed": (Lengths(128, 128), Lengths(64, 64)),
    "shared-prefix": (Lengths(20, 20), Lengths(32, 32)),
    "fan-out": (Lengths(256, 256), Lengths(32, 32)),
    **{name: (Lengths(1, 1), Lengths(text.max_tokens, text.max_tokens)) for name, text in TEXT_WORKLOADS.items()},
}
"""The usual lengths of each kind in tokens: prompt, output."""
PREFIX_TOKENS, SAMPLES = 580, 16
"""The usual prefix of shared-prefix, and the samples of a prompt of fan-out."""


class LoadRequest(msgspec.Struct, frozen=True):
    """One request. `seed`: the text is sampled with this seed; None: it is greedy."""

    prompt: str | list[int] | list[dict[str, Any]]
    """A text, token ids, or for a chat all its messages."""
    max_tokens: int
    n: int = 1
    seed: int | None = None
    temperature: float = 1.0
    """With a seed."""
    schema: dict[str, Any] | None = None
    """The output is JSON of this schema."""
    ignore_eos: bool = True
    """The output has `max_tokens`, if the server knows the field. False: the model ends it."""


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of workload and its sizes in tokens, which are approximate for prompts. Raises `ConfigError`."""

    kind: Kind
    n_requests: int
    prompt_tokens: Lengths
    """Length of each prompt, without a shared prefix. Not used where `kind` is one of `TEXT_WORKLOADS`."""
    output_tokens: Lengths
    prefix_tokens: int = 0
    """Length of the prefix of every prompt (shared-prefix)."""
    prefix_seed: int | None = None
    """The prefix is that of this seed in every repeat and for every seed of the load; None: each repeat has its own."""
    samples: int = 1
    """Samples of each prompt (fan-out)."""
    samples_by: SamplesBy = "requests"
    """`requests`: each sample is a request with its own seed. `n`: one request asks for all samples of a prompt."""

    def __post_init__(self) -> None:
        self.prompt_tokens.check("--prompt-tokens")
        self.output_tokens.check("--output-tokens")
        check_least({"--requests": self.n_requests, "--samples": self.samples})

    def __str__(self) -> str:
        if text := TEXT_WORKLOADS.get(self.kind):
            return f"{self.kind}: {text.about}, at most {self.output_tokens.high} new tokens"
        sizes = f"prompts of {self.prompt_tokens} tokens, {self.output_tokens} new"
        if self.kind == "shared-prefix":
            shared = f"{self.prefix_tokens} tokens in common"
            sizes = f"{shared}, {self.prompt_tokens} of their own, {self.output_tokens} new"
        if self.kind == "fan-out":
            by = " (n)" if self.samples_by == "n" else ""
            sizes = f"{sizes}, {self.samples} samples of each{by}"
        return f"{self.kind}: {sizes}"

    def requests(self, seed: int, repeat: int) -> list[LoadRequest]:
        """Returns the same requests for the same arguments.

        Each repeat has different prompts, with the same lengths in another order.
        """
        if self.kind == "fan-out":
            return list(self._fan_out(seed, repeat))
        if text := TEXT_WORKLOADS.get(self.kind):
            return [
                LoadRequest(
                    prompt,
                    self.output_tokens.high,
                    seed=i if text.temperature else None,
                    temperature=text.temperature,
                    schema=text.schema,
                    ignore_eos=False,
                )
                for i, prompt in enumerate(text.prompts(self.n_requests, f"{seed}/{repeat}"))
            ]
        rng = _rng(seed, repeat, "prefix") if self.prefix_seed is None else Random(self.prefix_seed)
        prefix = random_text(rng, self.prefix_tokens)
        return [
            LoadRequest(f"{prefix} {own}".strip(), max_tokens)
            for own, max_tokens in self._prompts(self.n_requests, seed, repeat)
        ]

    def _fan_out(self, seed: int, repeat: int) -> Iterator[LoadRequest]:
        """Yields requests for at least `n_requests` samples."""
        n_prompts = -(-self.n_requests // self.samples)
        for i, (prompt, max_tokens) in enumerate(self._prompts(n_prompts, seed, repeat)):
            seeds = [1 + i * self.samples + j for j in range(self.samples)]
            if self.samples_by == "n":
                yield LoadRequest(prompt, max_tokens, n=self.samples, seed=seeds[0])
            else:
                yield from (LoadRequest(prompt, max_tokens, seed=each) for each in seeds)

    def _prompts(self, n: int, seed: int, repeat: int) -> Iterator[tuple[str, int]]:
        """Yields texts and numbers of output tokens."""
        order = _rng(seed, repeat, "lengths")
        lengths = [sizes.spread(n) for sizes in (self.prompt_tokens, self.output_tokens)]
        for each in lengths:
            order.shuffle(each)
        for i, (n_prompt, n_output) in enumerate(zip(*lengths, strict=True)):
            yield random_text(_rng(seed, repeat, i), n_prompt), n_output


def make_workload(
    kind: Any,
    n_requests: int,
    *,
    prompt_tokens: Lengths | None = None,
    output_tokens: Lengths | None = None,
    prefix_tokens: int = PREFIX_TOKENS,
    prefix_seed: int | None = None,
    samples: int = SAMPLES,
    samples_by: SamplesBy = "requests",
) -> Workload:
    """Returns a workload with the usual sizes of its kind for those that are not given. Raises `ConfigError`."""
    if kind in TEXT_WORKLOADS and prompt_tokens:
        raise ConfigError(f"--prompt-tokens does not apply to --workload {kind}: its texts have fixed lengths")
    prompt, output = SIZES[kind]
    return Workload(
        kind=kind, n_requests=n_requests, prompt_tokens=prompt_tokens or prompt, output_tokens=output_tokens or output,
        prefix_tokens=prefix_tokens if kind == "shared-prefix" else 0, prefix_seed=prefix_seed,
        samples=samples if kind == "fan-out" else 1, samples_by=samples_by,
    )  # fmt: skip


def warm_up(workload: Workload, n: int, seed: int) -> list[LoadRequest]:
    """Returns `n` requests of these sizes with prompts that no repeat uses."""
    return workload.requests(seed, repeat=-1)[:n]


def _rng(seed: int, repeat: int, what: object) -> Random:
    return Random(f"{seed}/{repeat}/{what}")


class LoadSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The workload and how it is sent. Raises `ConfigError`."""

    workload: Workload
    concurrency: int = 16
    """Number of clients in a closed loop."""
    rate: float | None = None
    """Requests/s in an open loop; None: a closed loop."""
    endpoint: Endpoint = "completions"
    model: str | None = None
    """None: each server's first model."""
    api_key: str | None = None
    warmup: int = 4
    """Requests to each server before the measurement."""
    repeats: int = 3
    seed: int
    latency_bound_ms: float | None = None
    """Bound of the time to first token of requests that count as goodput."""
    timeout: float = 300
    """Seconds for a request."""

    def __post_init__(self) -> None:
        check_least({"--concurrency": self.concurrency, "--repeats": self.repeats})
        check_least({"--warmup": self.warmup}, 0)
        if self.api_key and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise ConfigError("--api-key contains characters that are not allowed in a header, such as a line break")
        above_zero = {"--rate": self.rate, "--timeout": self.timeout, "--latency-bound-ms": self.latency_bound_ms}
        for flag, number in above_zero.items():
            if number is not None and not 0 < number < float("inf"):
                raise ConfigError(f"{flag} is {number:g}; it must be above 0")
