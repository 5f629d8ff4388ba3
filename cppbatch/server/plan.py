"""What an HTTP request comes to."""

from __future__ import annotations

from dataclasses import dataclass, field

from cppbatch.engine.request import GenerationRequest
from cppbatch.server.reply import Reply


@dataclass(frozen=True)
class Plan:
    """The engine's requests, and how their events are told."""

    requests: list[GenerationRequest]
    reply: Reply
    stream: bool = False
    renames: dict[str, str] = field(default_factory=dict)
    """Fields of the engine's requests by the names that the client has given for them, for errors."""
