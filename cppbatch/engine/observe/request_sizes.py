"""The sizes of a model's requests, kept when an engine ends: later starts choose attention for them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple

from cppbatch.engine.observe.metrics import EngineStats
from cppbatch.findings import finding_path, read_finding, write_finding
from cppbatch.models.find import file_identity

_LEAST = 16.0  # requests: fewer say little about the next ones


class RequestSizes(NamedTuple):
    """Sums over requests. Those of earlier engines count half as much each time another one ends."""

    requests: float
    prompt_tokens: float
    """Including those from the prefix cache."""
    computed_tokens: float
    """Of the prompts."""
    output_tokens: float

    @property
    def context(self) -> float:
        """Tokens of a sequence while it decodes, on average."""
        return (self.prompt_tokens + self.output_tokens / 2) / self.requests


def known_sizes(model: Path) -> RequestSizes | None:
    """The sizes of earlier requests to this file; None if there were few. Raises `OSError` if it cannot be read."""
    known = read_finding(_path(model), RequestSizes)
    return known if known and known.requests >= _LEAST and known.output_tokens else None


def keep_sizes(model: Path, stats: EngineStats) -> None:
    """Adds the requests of an engine to those of earlier ones. Raises `OSError` if the file cannot be read."""
    if not stats.generated_tokens:
        return
    prompt_tokens = stats.prompt_tokens + stats.prefix_hit_tokens
    now = RequestSizes(sum(stats.finished.values()), prompt_tokens, stats.prompt_tokens, stats.generated_tokens)
    before = read_finding(_path(model), RequestSizes) or RequestSizes(0, 0, 0, 0)
    write_finding(_path(model), RequestSizes(*(new + old / 2 for new, old in zip(now, before, strict=True))))


def _path(model: Path) -> Path:
    return finding_path("request-sizes", hashlib.sha256(repr(file_identity(model)).encode()).hexdigest()[:16])
