"""Conversations and texts that are longer than the context: their oldest messages, or their ends, are left out."""

from __future__ import annotations

import logging

from msgspec.structs import replace

from cppbatch.chat.chat_format import ChatTurn
from cppbatch.errors import InvalidRequest
from cppbatch.server.api.ollama.fields import Options
from cppbatch.server.models.serving import Json, ResolvedRequest, Serving

log = logging.getLogger("cppbatch.server")


async def resolve_within_context(
    serving: Serving, turn: ChatTurn, sampling: Options, id_prefix: str, *, truncate: bool
) -> ResolvedRequest:
    """Prepares the turn. With `truncate`, leaves out messages, the oldest first, until the prompt and an eighth of the
    context for the answer fit. System messages and the last message remain: a prompt that is still too long is
    refused."""
    resolved = await serving.resolve(turn, sampling, id_prefix)
    # an eighth of the context remains for the answer
    most = serving.info.max_sequence - serving.info.max_sequence // 8
    # A token has at least one byte.
    if not truncate or len(resolved.chat.prompt.encode()) + _n_media(turn) * most <= most:
        return resolved

    async def fits(shorter: ChatTurn) -> bool:
        try:
            return len(await serving.chat_tokens(await serving.render(shorter))) <= most
        except InvalidRequest as error:
            if error.overflow:
                return False
            raise

    if await fits(turn):
        return resolved
    places = removable(turn.messages)
    low, high = 0, len(places)  # all fits after `high`, if anything does
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if await fits(without(turn, places[middle])) else (middle + 1, high)
    if low == len(places):
        return resolved  # the engine refuses it, and says how long it is
    log.warning(
        "%s: left out the oldest %d messages of a conversation longer than the context of %d tokens (-c)",
        serving.name, len(turn.messages) - len(without(turn, places[low]).messages), serving.info.max_sequence,
    )  # fmt: skip
    return await serving.resolve(without(turn, places[low]), sampling, id_prefix)


def _n_media(turn: ChatTurn) -> int:
    return sum(isinstance(message["content"], list) for message in turn.messages)


def removable(messages: list[Json]) -> list[int]:
    """The places before which all messages but system messages can be left out: each is a user's message."""
    first = next((i for i, message in enumerate(messages) if message["role"] != "system"), 0)
    return [i for i, message in enumerate(messages) if i > first and message["role"] == "user"]


def without(turn: ChatTurn, place: int) -> ChatTurn:
    """The turn without the messages before this place, except system messages."""
    kept = [message for i, message in enumerate(turn.messages) if i >= place or message["role"] == "system"]
    return replace(turn, messages=kept)
