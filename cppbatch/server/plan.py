"""What an HTTP request comes to."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from cppbatch.engine.request import GenerationEvent, GenerationRequest
from cppbatch.errors import InvalidRequest
from cppbatch.server.reply import Reply
from cppbatch.server.run import Event


@dataclass(frozen=True)
class Plan:
    """The engine's requests, and how their events are told."""

    requests: list[GenerationRequest]
    reply: Reply
    stream: bool = False
    renames: dict[str, str] = field(default_factory=dict)
    """Fields of the engine's requests by the names that the client has given for them, for errors."""

    def renamed(self, error: InvalidRequest) -> InvalidRequest:
        """What the engine refuses, with the field named as the client does."""
        return InvalidRequest({"task": "model", **self.renames}.get(error.field, error.field), error.message)


async def gather(events: AsyncGenerator[Event, None], plan: Plan) -> list[list[GenerationEvent]]:
    """Waits for every completion: all events of each. Raises what the reply makes of a failed one."""
    completions: list[list[GenerationEvent]] = [[] for _ in plan.requests]
    async with contextlib.aclosing(events):
        async for index, event in events:
            plan.reply.note(index, event)
            completions[index].append(event)
    return completions
