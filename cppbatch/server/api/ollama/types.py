"""The types of `/api/chat`, `/api/generate`, `/api/embed` and `/api/embeddings`: requests and responses."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from cppbatch.chat.messages import Tool
from cppbatch.server.answer.logprobs import ChatTokenLogprob
from cppbatch.server.fields.structured import Schema

Json = dict[str, Any]

DoneReason = Literal["stop", "length", "load", "unload"]
"""`load`, `unload`: the request had no prompt, and the model is loaded, or unloaded after its last request."""

# --- requests -------------------------------------------------------------------------------------------------------


class ModelFields(msgspec.Struct, kw_only=True):
    """Fields of all requests that use a model."""

    model: str
    options: Json | None = None
    """Sampling: `temperature`, `top_k`, `top_p`, `min_p`, `typical_p`, `repeat_penalty`, `repeat_last_n`,
    `presence_penalty`, `frequency_penalty`, `seed`, `stop`, `num_predict`, `num_keep`, `mirostat` and other settings of
    `/v1/chat/completions` that are numbers or switches. Others have no effect."""
    keep_alive: float | str | None = None
    """How long the model stays loaded after its last request: seconds, or a text such as `5m`; 0: it is unloaded after
    this request; negative: it stays. Default: the server's setting."""


class GenerationFields(ModelFields, kw_only=True):
    """Fields of requests for a text."""

    stream: bool | None = None
    """Default: true."""
    format: Schema | str | None = None
    """`json`, or a JSON schema."""
    think: bool | str | None = None
    """Whether the model reasons first: true, false, `low`, `medium`, `high` or `max`. Default: the chat template's."""
    truncate: bool | None = None
    """False: refuse a conversation longer than the context. Default: leave out its oldest messages."""
    shift: bool | None = None
    """Not used: whether a full context is shifted is a setting of the server (--context-shift)."""
    logprobs: bool | None = None
    top_logprobs: int | None = None
    """Most likely tokens at each position, up to 20; requires `logprobs`."""

    @property
    def streams(self) -> bool:
        """Whether the response is a stream."""
        return self.stream is not False


class RequestedFunction(msgspec.Struct):
    """The function of a call."""

    name: str
    arguments: Json | str = "{}"
    """An object, or a text that contains one."""


class RequestedCall(msgspec.Struct):
    """A call in an earlier message of the assistant."""

    function: RequestedFunction
    id: str | None = None


class RequestMessage(msgspec.Struct):
    """A message of the conversation."""

    role: str
    content: str | None = None
    thinking: str | None = None
    """The assistant's reasoning."""
    images: list[str] | None = None
    """Base64, with or without the prefix of a data URL."""
    tool_calls: list[RequestedCall] | None = None
    tool_name: str | None = None
    """For a tool's result: the name of the tool."""
    tool_call_id: str | None = None
    """For a tool's result: the id of its call. Without one, results answer the calls in their order."""


class OllamaChatRequest(GenerationFields, kw_only=True):
    """The body of `POST /api/chat`."""

    messages: list[RequestMessage] | None = None
    """Without messages, the model is only loaded, or unloaded with `keep_alive` 0."""
    tools: list[Tool] | None = None


class OllamaGenerateRequest(GenerationFields, kw_only=True):
    """The body of `POST /api/generate`."""

    prompt: str = ""
    """Without a prompt, the model is only loaded, or unloaded with `keep_alive` 0."""
    suffix: str | None = None
    """The text after the completion, for models trained to fill in the middle."""
    images: list[str] | None = None
    """Base64, with or without the prefix of a data URL."""
    system: str | None = None
    template: str | None = None
    """Not supported: templates are settings of the server (--chat-template)."""
    context: list[int] | None = None
    """The `context` of an earlier response, which this prompt continues."""
    raw: bool | None = None
    """Use the prompt unchanged, without the chat template."""


class OllamaEmbedRequest(ModelFields, kw_only=True):
    """The body of `POST /api/embed`."""

    input: str | list[str] | None = None
    truncate: bool | None = None
    """False: refuse an input that is longer than the context. Default: cut its end off."""
    dimensions: int | None = None
    """Truncate each vector to this many numbers."""


class OllamaEmbeddingsRequest(ModelFields, kw_only=True):
    """The body of `POST /api/embeddings`."""

    prompt: str = ""


# --- responses ------------------------------------------------------------------------------------------------------


class CalledFunction(msgspec.Struct, frozen=True, kw_only=True):
    """The function of a call."""

    index: int
    name: str
    arguments: Json


class OllamaCall(msgspec.Struct, frozen=True, kw_only=True):
    """A tool call of the assistant."""

    id: str
    function: CalledFunction


class OllamaMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The assistant's message, or its next part."""

    role: Literal["assistant"] = "assistant"
    content: str = ""
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaCall] | UnsetType = UNSET


class DoneFields(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of a whole response, and of the last line of a stream. Durations are in nanoseconds."""

    model: str
    created_at: str
    """RFC 3339."""
    done: bool
    done_reason: DoneReason | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    """The time for which the request waited for its model."""
    prompt_eval_count: int | UnsetType = UNSET
    """Tokens of the prompt, also those taken from the prefix cache."""
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    logprobs: list[ChatTokenLogprob] | UnsetType = UNSET


class OllamaChatResponse(DoneFields, frozen=True, kw_only=True):
    """`POST /api/chat`: the response, or a line of the stream."""

    message: OllamaMessage


class OllamaGenerateResponse(DoneFields, frozen=True, kw_only=True):
    """`POST /api/generate`: the response, or a line of the stream."""

    response: str
    thinking: str | UnsetType = UNSET
    context: list[int] | UnsetType = UNSET
    """The tokens of prompt and response, for the next request. Absent with `raw`, `suffix` and `images`."""


class OllamaEmbedResponse(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /api/embed`."""

    model: str
    embeddings: list[list[float]]
    """Normalised to length 1."""
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET


class OllamaEmbeddingsResponse(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /api/embeddings`."""

    embedding: list[float]
    """The vector as computed, not normalised."""
