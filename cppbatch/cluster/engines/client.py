"""The asyncio interface of an engine: on a thread of this process, in a worker process, or several workers."""

from __future__ import annotations

import asyncio
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from cppbatch.chat.chat_format import ChatFormat, PreparedChat
from cppbatch.chat.output_parser import openai_message
from cppbatch.chat.template import ChatTemplate
from cppbatch.chat.template_program import NeedsChild, quick_only
from cppbatch.config import EngineConfig
from cppbatch.engine.chat_results import ChatCompletion, ChatEvent, ChatReader
from cppbatch.engine.chats import ChatFormats, ChatOptions, ChatRequests, Conversation, Json
from cppbatch.engine.disk.slots import SlotActionName, SlotReport
from cppbatch.engine.model_info import ModelInfo
from cppbatch.engine.observe.live_state import LiveEngine
from cppbatch.engine.observe.metrics import EngineStats
from cppbatch.engine.params import Params
from cppbatch.engine.request import GenerationEvent, GenerationRequest, MediaPrompt, TokenPiece
from cppbatch.errors import ConfigError, EngineClosed, InvalidRequest, client_names
from cppbatch.statistic import counter, gauge

if TYPE_CHECKING:
    from typing_extensions import Unpack

Engine = TypeVar("Engine", bound="EngineClient")
Result = TypeVar("Result")


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """The state of an engine."""

    status: Literal["loading", "ok", "sleeping", "restarting", "failed", "closed"]
    """`sleeping`: its worker has stopped because it was idle; a request starts the next one and waits for it.
    `restarting`: its worker died; requests are accepted and continue in the next worker."""
    progress: float = 0.0
    """0.0 to 1.0 while loading, including after waking from sleep."""
    error: str | None = None
    """Why it failed or is restarting."""

    @property
    def takes_requests(self) -> bool:
        """Whether new requests are accepted."""
        return self.status in ("ok", "sleeping", "restarting")

    @property
    def refusal(self) -> str:
        """The error message for a request while none are accepted."""
        reason = f": {self.error}" if self.error else ""
        return f"the engine does not accept requests: it is {self.status}{reason}"


class WorkerState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one engine of a client."""

    name: str
    """`local`, or the worker's number."""
    health: Annotated[
        Health,
        gauge(
            "1 if the worker is running; 0 if it is loading, sleeping, restarting or failed", name="up", shown="is_up"
        ),
    ]
    in_flight: Annotated[int, gauge("Unfinished requests assigned to the worker")]
    pid: int | None = None
    """None while no process runs."""
    device: int | None = None
    """The GPU assigned to it, if any."""
    restarts: Annotated[int, counter("Number of worker restarts after a crash")] = 0
    draining: bool = False
    """Whether it gets no new requests and stops after its last one (autoscaling)."""
    stats: EngineStats | None = None
    """None while it does not respond."""
    model: str | UnsetType = UNSET
    """The name of its model, on a server with several."""

    @property
    def is_up(self) -> bool:
        """Whether it is running."""
        return self.health.status == "ok"

    def live(self, engine: LiveEngine | None, age: float | None) -> WorkerLive:
        """The same worker for `GET /live`."""
        return WorkerLive(
            name=self.name,
            pid=self.pid,
            device=self.device,
            health=self.health,
            in_flight=self.in_flight,
            restarts=self.restarts,
            draining=self.draining,
            age=age,
            engine=engine,
        )


class WorkerLive(msgspec.Struct, frozen=True, kw_only=True):
    """The current activity of a worker or replica."""

    name: str
    """`local`, the worker's number, or the replica's name."""
    pid: int | None
    """None while no process runs."""
    device: int | None
    """The GPU assigned to it, if any."""
    health: Health
    in_flight: int
    """Unfinished requests."""
    restarts: int
    draining: bool
    """Whether it gets no new requests and stops after its last one."""
    age: float | None
    """The age of `engine` in seconds, since a worker responds between two steps. None like `engine`."""
    engine: LiveEngine | None
    """None while no engine is running."""


class ScalingState(msgspec.Struct, frozen=True, kw_only=True):
    """The number of workers, with autoscaling."""

    min_workers: int
    max_workers: int
    running: Annotated[
        int,
        gauge(
            "Workers by state. draining: accepts no new requests and ends after its last one",
            name="workers",
            label="state",
            shown="by_state",
        ),
    ]
    """Workers that accept requests."""
    starting: int
    draining: int
    scale_ups: Annotated[
        int,
        counter(
            "Workers started because requests were waiting (up) or drained because of low load (down)",
            name="scale_events",
            label="direction",
            shown="events",
        ),
    ]
    scale_downs: int
    held_back: str | None = None
    """Why the last worker required by the load was not started."""

    @property
    def by_state(self) -> dict[str, int]:
        """The workers as shown by `GET /metrics`."""
        return {"running": self.running, "starting": self.starting, "draining": self.draining}

    @property
    def events(self) -> dict[str, int]:
        """The changes by direction, for `GET /metrics`."""
        return {"up": self.scale_ups, "down": self.scale_downs}


class EngineClient(ABC):
    """An engine for asyncio code. `async with client:` waits until the model is loaded, and closes it at the end."""

    config: EngineConfig
    """The engine's settings; with several workers, those of one worker."""

    @abstractmethod
    async def loaded(self) -> None:
        """Waits until requests are accepted. Raises the errors of loading."""

    @property
    @abstractmethod
    def info(self) -> ModelInfo:
        """The loaded model. Raises `EngineClosed` before it is loaded."""

    @abstractmethod
    def health(self) -> Health:
        """The current state of the engine."""

    def scaling(self) -> ScalingState | None:
        """The scaling state, if the number of workers follows the load; None: it is fixed."""
        return None

    @property
    def max_parallel(self) -> int:
        """Maximum requests computed at the same time, with the maximum number of workers."""
        return self.config.n_parallel

    @abstractmethod
    async def check(self, request: GenerationRequest) -> None:
        """Raises `InvalidRequest`, `EngineClosed` or `GenerationFailed` for a request that `submit` would refuse."""

    @abstractmethod
    async def tokenize(
        self, text: str | list[int] | MediaPrompt, *, add_special: bool = True, parse_special: bool = True
    ) -> list[TokenPiece]:
        """A prompt's tokens, or the pieces of token ids; as `BatchInferenceEngine.tokens`. Raises as `check` does."""

    @abstractmethod
    async def slot_action(self, action: SlotActionName, slot: int, path: str = "") -> SlotReport:
        """Saves the cached prefix of a slot (`id_slot`) to a file, restores it from there, or erases it.

        A restored file becomes a cached prefix, which any request with these tokens reuses. Raises `InvalidRequest` for
        a slot without a prefix, and for an unusable file; otherwise as `check` does.
        """

    @abstractmethod
    def submit(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        """Runs a request: `async for event in client.submit(request)`; the last event has a finish reason.

        The first step of the iteration raises `InvalidRequest`, `QueueFull` or `EngineClosed`. Closing the iterator
        early (`contextlib.aclosing`) cancels the request. A reader slower than the engine gets merged events: the same
        text and tokens in fewer pieces.
        """

    async def chat(
        self, conversation: Conversation, params: Params = None, **options: Unpack[ChatOptions]
    ) -> ChatCompletion:
        """Generates the assistant's next message of a conversation: `await client.chat("Why is the sky blue?")`.

        Concurrent calls share a batch: `await asyncio.gather(*(client.chat(each) for each in conversations))`.
        Arguments and result: as in `BatchInferenceEngine.chat`, for one conversation. Raises the errors of `submit`;
        `ConfigError` for an unknown `chat_template`.
        """
        async with self.chat_stream(conversation, params, **options) as stream:
            async for _ in stream:
                pass
        assert stream.completion
        return stream.completion

    def chat_stream(
        self, conversation: Conversation, params: Params = None, **options: Unpack[ChatOptions]
    ) -> AsyncChatStream:
        """The same message during generation: `async for event in client.chat_stream(messages)`.

        Leaving `async with client.chat_stream(messages) as stream:` cancels it. The first event raises as `chat` does.
        """
        return AsyncChatStream(self._chat_events(conversation, params, options))

    async def _chat_events(
        self, conversation: Conversation, params: Params, options: ChatOptions
    ) -> AsyncGenerator[tuple[GenerationEvent, PreparedChat], None]:
        """The events of the request, with the parser of their text."""
        chat_format = await self.chat_format(options.get("chat_template"))
        requests = ChatRequests(chat_format, options)
        name = f"chat-{uuid.uuid4().hex}"
        request, chat = await self.render(chat_format, lambda: requests.request(name, conversation, params))
        with client_names(chat.field_names):
            async with aclosing(self.submit(request)) as events:
                async for event in events:
                    yield event, chat

    async def chat_format(self, template: str | ChatTemplate | None = None) -> ChatFormat:
        """The model's chat format: its template, tool calls and reasoning, or those of another template.

        Raises as `chat` does.
        """
        formats = self.chat_formats
        chat = formats.made.get(template)
        if chat is None:  # on another thread, because learning a template's forms may take a second or two
            chat = await asyncio.wrap_future(formats.submit(lambda: formats.get(template)))
        if chat.token_ids is None:
            tokens = {marker: await self.tokenize(marker, add_special=False) for marker in chat.markers}
            formats.add_tokens(chat, tokens)
        return chat

    async def render(self, chat: ChatFormat | None, function: Callable[[], Result]) -> Result:
        """Runs a function that renders this format's template, if any, on another thread, because that takes time.

        If the template needs a child process, it is one of the model's own threads, so that other models never wait
        for it. The function may then be called twice. Raises what it raises.
        """
        if chat is None or chat.template.is_quick:

            def run() -> Result:
                with quick_only():
                    return function()

            with suppress(NeedsChild):
                return await asyncio.to_thread(run)
        return await asyncio.wrap_future(self.chat_formats.submit(function))

    @cached_property
    def chat_formats(self) -> ChatFormats:
        """The model's chat formats. Those not yet returned by `chat_format` lack token ids."""
        return ChatFormats(self.info)

    @abstractmethod
    async def cancel(self, request_id: str) -> None:
        """Ends a request within a step; its iterator gets a last event. Unknown ids are ignored."""

    @abstractmethod
    async def stats(self) -> EngineStats:
        """Counters and state, summed over all workers. Raises `EngineClosed` while no worker responds."""

    @abstractmethod
    async def workers(self) -> list[WorkerState]:
        """The state of each engine."""

    @abstractmethod
    async def live(self) -> list[WorkerLive]:
        """The live state of each engine, for `GET /live`. Returns soon: an engine in a long step shows an earlier
        state.

        May be called several times per second. Idle engines are not queried, and sleeping ones are not woken.
        """

    def sleep_after(self, _seconds: float | None) -> bool:
        """Lets the workers stop after this time without requests, once; -1: never; None: as configured. Returns whether
        this engine has workers that stop and start."""
        return False

    @property
    def seconds_left(self) -> float | None:
        """Until all workers have stopped if no request comes; None: never, or they have stopped."""
        return None

    @abstractmethod
    async def close(self) -> None:
        """Closes the engine; unfinished requests get a last event (cancelled)."""

    async def __aenter__(self: Engine) -> Engine:
        try:
            await self.loaded()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


def id_in_use(request_id: str) -> InvalidRequest:
    """The error for a request whose id is in use by an unfinished request."""
    return InvalidRequest("id", f"{request_id!r} is already the id of a running request; choose another")


class OwnLoop:
    """The event loop in which an engine was created."""

    def __init__(self, name: str) -> None:
        """`name`: of the engine's class. Raises `ConfigError` outside an event loop."""
        self._name = name
        try:
            self.loop = asyncio.get_running_loop()
        except RuntimeError:
            raise ConfigError(
                f"{name} needs a running event loop: create it in a coroutine with `async with {name}(...)`. Without "
                "asyncio, use BatchInferenceEngine"
            ) from None

    def check(self) -> None:
        """Raises `EngineClosed` in another event loop, where nothing would wake the caller."""
        if asyncio.get_running_loop() is self.loop:
            return
        remedy = (
            "create the engine in the event loop that uses it, for example in the same `asyncio.run`"
            if self.loop.is_closed()
            else "await it there, for example with `asyncio.run_coroutine_threadsafe`"
        )
        state = "which is closed" if self.loop.is_closed() else "which is still open"
        raise EngineClosed(f"the {self._name} belongs to another event loop, {state}: {remedy}")


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
