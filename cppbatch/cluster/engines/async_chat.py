"""Chats for asyncio, with any `EngineClient`."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from types import TracebackType
from typing import TYPE_CHECKING

from cppbatch.chat.chat_format import PreparedChat
from cppbatch.chat.output_parser import openai_message
from cppbatch.engine.chats import ChatCompletion, ChatEvent, ChatOptions, ChatReader, ChatRequests, Conversation, Json
from cppbatch.engine.params import Params
from cppbatch.engine.request import GenerationEvent
from cppbatch.errors import InvalidRequest

if TYPE_CHECKING:
    from cppbatch.cluster.engines.client import EngineClient


class AsyncChatStream:
    """`ChatStream` for asyncio: `async for event in stream`."""

    def __init__(self, events: AsyncGenerator[tuple[GenerationEvent, PreparedChat], None]) -> None:
        self._events = events
        self._reader: ChatReader | None = None
        self.completion: ChatCompletion | None = None
        """The whole answer; None until it is complete."""

    @property
    def message(self) -> Json:
        """The message so far, as OpenAI's object: append it to the conversation."""
        return self._reader.message if self._reader else openai_message("", "", [])

    def __aiter__(self) -> AsyncChatStream:
        return self

    async def __anext__(self) -> ChatEvent:
        event, chat = await anext(self._events)
        self._reader = self._reader or ChatReader(chat)
        said = self._reader.read(event)
        self.completion = said.completion
        return said

    async def aclose(self) -> None:
        """Cancels the answer if it is incomplete."""
        await self._events.aclose()

    async def __aenter__(self) -> AsyncChatStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()


def chat_stream(
    client: EngineClient, conversation: Conversation, params: Params, options: ChatOptions
) -> AsyncChatStream:
    """See `EngineClient.chat_stream`."""
    return AsyncChatStream(_events(client, conversation, params, options))


async def chat(
    client: EngineClient, conversation: Conversation, params: Params, options: ChatOptions
) -> ChatCompletion:
    """See `EngineClient.chat`."""
    async with chat_stream(client, conversation, params, options) as stream:
        async for _ in stream:
            pass
    assert stream.completion
    return stream.completion


async def _events(
    client: EngineClient, conversation: Conversation, params: Params, options: ChatOptions
) -> AsyncGenerator[tuple[GenerationEvent, PreparedChat], None]:
    """The events of the request, with the parser of their text."""
    requests = ChatRequests(await client.chat_format(options.get("chat_template")), options)
    # On another thread, because rendering a long conversation takes time.
    made = await asyncio.to_thread(requests.request, f"chat-{uuid.uuid4().hex}", conversation, params)
    try:
        async with aclosing(client.submit(made.request)) as events:
            async for event in events:
                yield event, made.chat
    except InvalidRequest as error:
        raise made.renamed(error) from error
