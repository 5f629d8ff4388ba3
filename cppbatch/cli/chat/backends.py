"""Backends of `cppbatch chat`: a model in this process, or a server with OpenAI's API."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec

from cppbatch.engine.params import UNLIMITED, sampling_params
from cppbatch.errors import CppBatchError, InvalidRequest

if TYPE_CHECKING:
    import aiohttp

    from cppbatch.engine.engine import BatchInferenceEngine

Json = dict[str, Any]
T = TypeVar("T")

FULL = "the context is full: /clear starts a new conversation"
"""The start of every message about a full context."""


class AnswerPart(msgspec.Struct, frozen=True, kw_only=True):
    """More of an answer."""

    text: str = ""
    reasoning: str = ""
    n_tokens: int = 0
    """New tokens. Servers do not report this; then at least one if there is new text."""
    end: AnswerEnd | None = None
    """Set in the last part of a complete answer."""


class AnswerEnd(msgspec.Struct, frozen=True, kw_only=True):
    """How an answer ended."""

    finish_reason: str
    n_tokens: int | None = None
    """For the whole answer; None: unknown."""


class ChatBackend(Protocol):
    """Answers conversations, one at a time. All methods raise `CppBatchError`."""

    @property
    def model(self) -> str:
        """The name of the model that answers."""

    @property
    def has_template(self) -> bool:
        """Whether the model's messages have a chat template; True: unknown."""

    def models(self) -> list[str]:
        """The names that `use` accepts."""

    def use(self, name: str) -> None:
        """Switches to this model."""

    def answer(self, messages: Sequence[Json], params: Json) -> Generator[AnswerPart, None, None]:
        """Generates the next message. `params`: fields of `SamplingParams`. Closing the generator cancels it.

        If the context is full, the error message starts with `FULL`.
        """

    def close(self) -> None:
        """Frees the model or the connection."""


class EngineBackend:
    """A model in this process."""

    def __init__(self, load: Callable[[str | None], BatchInferenceEngine], named: str | None, **options: Any) -> None:
        """`load`: loads a model by file or name (None: the model that commands use without -m). `options`: of
        `chat_stream`."""
        self._load, self._options = load, options
        self._engine = load(named)

    @property
    def model(self) -> str:
        """See `ChatBackend`."""
        return self._engine.info.name

    @property
    def has_template(self) -> bool:
        """See `ChatBackend`."""
        return bool(self._options.get("chat_template") or self._engine.info.chat_template)

    def models(self) -> list[str]:
        """See `ChatBackend`: the models in the models folder."""
        from cppbatch.models.find import models_folder, models_in, short_name

        return [short_name(path) for path in models_in(models_folder())]

    def use(self, name: str) -> None:
        """See `ChatBackend`. If the model cannot be loaded, the current one stays."""
        from cppbatch.models.pull import choose_model

        path = str(choose_model(name))  # raises while the current model is still loaded
        before = self._engine.config.model_path
        self._engine.close()  # memory may not hold both
        try:
            self._engine = self._load(path)
        except BaseException:
            self._engine = self._load(before)
            raise

    def answer(self, messages: Sequence[Json], params: Json) -> Generator[AnswerPart, None, None]:
        """See `ChatBackend`."""
        try:
            wanted = sampling_params({"max_tokens": UNLIMITED} | params)  # the session has its own limit
            with self._engine.chat_stream(messages, wanted, clamp_max_tokens=True, **self._options) as stream:
                for event in stream:
                    end = None
                    if done := event.completion:
                        if done.error:
                            raise CppBatchError(done.error)
                        end = AnswerEnd(finish_reason=done.finish_reason.value, n_tokens=done.usage.completion_tokens)
                    yield AnswerPart(text=event.text, reasoning=event.reasoning, n_tokens=len(event.tokens), end=end)
        except InvalidRequest as error:
            if not (over := error.overflow):
                raise
            message = (
                f"{FULL}; or enlarge the context with -c N. The context holds {over.n_ctx:,} tokens, and this "
                "conversation has"
            )
            raise CppBatchError(f"{message} {over.n_prompt_tokens:,}") from error

    def close(self) -> None:
        """See `ChatBackend`."""
        self._engine.close()


class ServerBackend:
    """A server with OpenAI's chat completions. Requests run on a thread, so that Ctrl-C interrupts only the waiting."""

    def __init__(self, url: str, *, model: str | None, api_key: str | None, **fields: Any) -> None:
        """`url`: with or without http:// and /v1. `model`: None: the server's only model, or the first loaded one.
        `fields`: added to every request. Raises `CppBatchError` if the server does not answer."""
        self._url = (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._fields = fields
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="cppbatch-chat-http", daemon=True)
        self._thread.start()
        self._session = self._wait(self._open())
        try:
            listed = self._list_models()
            if not (model or listed):
                raise CppBatchError(f"{self._url} serves no models; add one there, or name another server with --url")
            self._model = model or next((each["id"] for each in listed if _is_loaded(each)), listed[0]["id"])
        except BaseException:
            self.close()
            raise

    @property
    def model(self) -> str:
        """See `ChatBackend`."""
        return self._model

    @property
    def has_template(self) -> bool:
        """See `ChatBackend`: the server says it at its start."""
        return True

    def models(self) -> list[str]:
        """See `ChatBackend`."""
        return [each["id"] for each in self._list_models()]

    def use(self, name: str) -> None:
        """See `ChatBackend`."""
        if name not in (names := self.models()):
            raise CppBatchError(f"model {name!r} not found at {self._url}; available: {', '.join(names)}")
        self._model = name

    def answer(self, messages: Sequence[Json], params: Json) -> Generator[AnswerPart, None, None]:
        """See `ChatBackend`."""
        body = {
            "model": self._model, "messages": messages, "stream": True, "stream_options": {"include_usage": True},
            **self._fields, **params,
        }  # fmt: skip
        events: queue.SimpleQueue[AnswerPart | BaseException | None] = queue.SimpleQueue()
        request = asyncio.run_coroutine_threadsafe(self._put_parts(body, events), self._loop)
        try:
            while (event := _next(events)) is not None:
                if isinstance(event, BaseException):
                    raise event
                yield event
        finally:
            request.cancel()  # closes the connection, which cancels the request in the server

    def close(self) -> None:
        """See `ChatBackend`."""
        self._wait(self._session.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def _open(self) -> aiohttp.ClientSession:
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=600)
        return aiohttp.ClientSession(headers=self._headers, timeout=timeout, read_bufsize=1 << 22)

    def _list_models(self) -> list[Json]:
        return self._wait(self._get_models())

    async def _get_models(self) -> list[Json]:
        async with self._request("GET", "/v1/models") as response:
            try:
                return list(msgspec.json.decode(await response.read())["data"])
            except (msgspec.DecodeError, KeyError, TypeError) as error:
                raise CppBatchError(
                    f"{self._url}/v1/models did not return a model list; is it an OpenAI-compatible server?"
                ) from error

    async def _put_parts(self, body: Json, events: queue.SimpleQueue[AnswerPart | BaseException | None]) -> None:
        """Puts the parts of an answer into the queue, and finally None or the error."""
        try:
            async with self._request("POST", "/v1/chat/completions", body) as response:
                async for part in _parts(response):
                    events.put(part)
            events.put(None)
        except Exception as error:
            events.put(error)

    @contextlib.asynccontextmanager
    async def _request(self, method: str, path: str, body: Json | None = None) -> AsyncIterator[aiohttp.ClientResponse]:
        """Raises `CppBatchError` for every failure, including while the block reads the response."""
        import aiohttp

        content = {} if body is None else {"data": msgspec.json.encode(body)}
        headers = {"Content-Type": "application/json"}
        try:
            async with self._session.request(method, self._url + path, headers=headers, **content) as response:
                if response.status != 200:
                    raise _refusal(response.status, await response.read())
                yield response
        except aiohttp.InvalidURL as error:
            raise CppBatchError(f"{self._url!r} is not a URL; give one such as http://127.0.0.1:8080") from error
        except aiohttp.ClientConnectorError as error:
            raise CppBatchError(
                f"cannot connect to {self._url}: {error.strerror or error}; check the address (--url), and that the "
                "server is running"
            ) from error
        except asyncio.TimeoutError as error:
            raise CppBatchError(
                f"{self._url} did not answer in time; check that the server is running, and try again"
            ) from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise CppBatchError(f"lost the connection to {self._url}: {error}") from error


def _next(events: queue.SimpleQueue[T]) -> T:
    """Waits for the next event. Raises `KeyboardInterrupt` immediately after Ctrl-C, also on Windows."""
    while True:
        with contextlib.suppress(queue.Empty):
            return events.get(timeout=0.2)  # Windows does not interrupt a wait without a timeout


async def _parts(response: aiohttp.ClientResponse) -> AsyncIterator[AnswerPart]:
    """The parts of an answer in server-sent events. Raises `CppBatchError`."""
    n_tokens, finish_reason = None, ""
    async for line in response.content:
        name, _, value = line.partition(b":")
        if name != b"data":
            continue
        if value.strip() == b"[DONE]":
            break
        chunk = msgspec.json.decode(value)
        if chunk.get("error"):
            raise _error(chunk)
        n_tokens = (chunk.get("usage") or {}).get("completion_tokens", n_tokens)
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            text, reasoning = delta.get("content") or "", delta.get("reasoning_content") or delta.get("reasoning") or ""
            if text or reasoning:
                yield AnswerPart(text=text, reasoning=reasoning, n_tokens=1)
            finish_reason = choice.get("finish_reason") or finish_reason
    if not finish_reason:
        raise CppBatchError("the server ended the answer before it was complete; use /retry to try again")
    yield AnswerPart(end=AnswerEnd(finish_reason=finish_reason, n_tokens=n_tokens))


def _refusal(status: int, body: bytes) -> CppBatchError:
    try:
        return _error(msgspec.json.decode(body))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return CppBatchError(f"the server answered with HTTP {status}: {body[:200].decode(errors='replace')}")


def _error(answer: Any) -> CppBatchError:
    """The error described by an OpenAI error object."""
    error = answer.get("error", answer) if isinstance(answer, Mapping) else answer
    if not isinstance(error, Mapping):
        return CppBatchError(f"the server answered: {error!s:.300}")
    message = str(error.get("message", error))
    if error.get("code") == "context_length_exceeded" or error.get("type") == "exceed_context_size_error":
        return CppBatchError(f"{FULL}. The server says: {message}")
    return CppBatchError(f"the server says: {message}")


def _is_loaded(model: Json) -> bool:
    status = model.get("status")
    return not isinstance(status, Mapping) or status.get("value") == "loaded"
