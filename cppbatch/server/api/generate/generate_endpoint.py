"""`POST /generate`: completes one prompt."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from cppbatch.chat.chat_format import ChatTurn
from cppbatch.chat.messages import ChatMessage, check_variables, conversation_of
from cppbatch.chat.reasoning import check_budget
from cppbatch.chat.tools import ToolChoice
from cppbatch.engine.request import FinishReason, GenerationEvent
from cppbatch.errors import InvalidRequest
from cppbatch.server.answer.logprobs import LogprobEntry, logprob_entries
from cppbatch.server.answer.response import ResponseBuilder, generation
from cppbatch.server.fields.sampling import SamplingFields
from cppbatch.server.http.endpoint import Routes
from cppbatch.server.http.event_stream import DONE, ServerSentEvent
from cppbatch.server.models.serving import ChatTools, ResolvedRequest, Serving, new_id

Json = dict[str, Any]

routes = Routes()


class GenerateFields(SamplingFields, kw_only=True):
    """The fields of `/generate` and `/generate/batch` except the prompts."""

    messages: list[ChatMessage] | None = None
    """A conversation instead of a prompt; the chat template renders it."""
    chat_template_kwargs: Json | None = None
    """For `messages`: additional chat template variables, such as `enable_thinking`."""
    thinking_budget: int | None = None
    """For `messages`: maximum reasoning tokens; -1: no limit."""
    parse_special: bool | None = None
    """For `messages`: read the texts of control tokens, such as `<|im_end|>`, in them as control tokens. Default: plain
    text, unless the server has --parse-special."""
    logprobs: int | None = None
    """Return log-probabilities of the generated tokens, and of up to 20 most likely tokens at each position."""
    echo: bool | None = None
    """Include the prompt in the text."""

    def check_single_completion(self) -> None:
        """Raises `InvalidRequest` if several completions per prompt are requested: each result has one."""
        for name in ("n", "best_of"):
            if getattr(self, name) not in (None, 1):
                message = "must be 1; for several texts from one prompt, use /generate/batch with several `params`"
                raise InvalidRequest(name, message)


class GenerateRequest(GenerateFields, kw_only=True):
    """The body of `POST /generate`, and an item of `/generate/batch` merged with the fields of all items."""

    prompt: str | list[int] | None = None
    """Text, or token ids, which are used unchanged."""


class GenerateTimings(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds since the request arrived."""

    queue_seconds: float
    """Until the first step."""
    time_to_first_token_seconds: float
    """0 if there was no token."""
    total_seconds: float


class GenerateResponse(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /generate`, not streamed."""

    text: str
    generated_text: str
    """Same as `text`, as in `/generate/batch`."""
    tokens: list[int]
    """The generated tokens."""
    token_texts: list[str]
    """The text of each token. A character that spans several tokens belongs to the last one."""
    logprobs: list[LogprobEntry] | UnsetType = UNSET
    """If requested."""
    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    """Prompt tokens found in the prefix cache."""
    drafted_tokens: int
    """Draft tokens that were verified (speculative decoding)."""
    accepted_tokens: int
    """Draft tokens that were accepted: part of the completion tokens."""
    seed: int
    """A request with this seed reproduces the text."""
    timings: GenerateTimings


class GenerateChunk(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a stream: new text and tokens. Only the last event has the fields from `finish_reason` on."""

    text: str | UnsetType = UNSET
    tokens: list[int] | UnsetType = UNSET
    token_texts: list[str] | UnsetType = UNSET
    logprobs: list[LogprobEntry] | UnsetType = UNSET
    finish_reason: FinishReason | UnsetType = UNSET
    prompt_tokens: int | UnsetType = UNSET
    completion_tokens: int | UnsetType = UNSET
    cached_tokens: int | UnsetType = UNSET
    drafted_tokens: int | UnsetType = UNSET
    accepted_tokens: int | UnsetType = UNSET
    seed: int | UnsetType = UNSET
    timings: GenerateTimings | UnsetType = UNSET


@generation(routes, "/generate", GenerateRequest, GenerateResponse)
async def prepare_generate(body: GenerateRequest, serving: Serving) -> GenerateBuilder:
    """Complete a prompt.

    Raises `InvalidRequest`.
    """
    chat, name = await chat_tools(serving, [body]), new_id("gen-")
    resolved = await serving.client.render(chat and chat.format, lambda: resolve(body, serving, name, chat))
    return GenerateBuilder(resolved, stream=body.stream)


async def chat_tools(serving: Serving, bodies: Iterable[GenerateFields]) -> ChatTools | None:
    """Renders the `messages` of these requests to prompts; None: no messages. Raises as `Serving.chat_tools`."""
    given = [body.messages for body in bodies if body.messages is not None]
    return await serving.chat_tools(await asyncio.to_thread(_readable, given)) if given else None


def _readable(given: list[list[ChatMessage]]) -> list[list[Json]]:
    """The conversations, except refused ones, whose errors are raised when their requests are prepared."""
    conversations = []
    for messages in given:
        with contextlib.suppress(InvalidRequest):
            conversations.append(conversation_of(messages))
    return conversations


def generate_turn(body: GenerateFields) -> ChatTurn:
    """The conversation of a request with `messages`. Raises `InvalidRequest`."""
    return ChatTurn(
        conversation_of(body.messages or []),
        choice=ToolChoice(mode="none"),
        schema=body.schema(),
        variables=check_variables(body.chat_template_kwargs or {}),
        thinking_tokens=check_budget(thinking_budget=body.thinking_budget),
        parse_special=body.parse_special,
        field_names={"response_format": body.constraint_field("response_format")},
    )


def resolve(body: GenerateRequest, serving: Serving, name: str, chat: ChatTools | None) -> ResolvedRequest:
    """The engine request for a prompt, or for `messages`, which `chat` renders. Raises `InvalidRequest`."""
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("prompt", "is required, unless messages is given; they cannot be combined")
    check_fields(body, serving)
    if body.prompt is not None:
        return ResolvedRequest(name, serving.engine_requests(body, name, [body.prompt]), body.field_names)
    assert chat
    serving.check_size(body)
    return serving.resolve_with(chat, generate_turn(body), body, name)


def check_fields(body: GenerateFields, serving: Serving) -> None:
    """Validates all fields except the prompt and the sampling parameters. Raises `InvalidRequest`."""
    body.check_single_completion()
    serving.check(body)


class GenerateBuilder(ResponseBuilder):
    """Builds the response of `/generate`."""

    stream_tail = (DONE,)

    def build(self, completions: list[list[GenerationEvent]]) -> GenerateResponse:
        text = "".join(event.text for event in completions[0])
        return text_result(GenerateResponse, completions[0], generated_text=text)

    def stream_events(self, index: int, event: GenerationEvent) -> list[ServerSentEvent]:
        return [ServerSentEvent(text_result(GenerateChunk, [event]))] if has_content(event) else []


Result = TypeVar("Result", bound=GenerateResponse | GenerateChunk)


def text_result(kind: type[Result], events: Sequence[GenerationEvent], **fields: Any) -> Result:
    """The text, tokens and log-probabilities of these events as a `kind`, with additional `fields`. If the last event
    ends the completion, the result includes how."""
    if entries := [entry for event in events for entry in event.logprobs]:
        fields["logprobs"] = logprob_entries(entries)
    last = events[-1]
    if last.finish_reason:
        fields["finish_reason"] = last.finish_reason
    if last.finish_reason and (usage := last.usage):  # a request that was cancelled while it waited has none
        fields |= {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "cached_tokens": usage.cached_tokens,
            "drafted_tokens": usage.drafted_tokens,
            "accepted_tokens": usage.accepted_tokens,
            "seed": last.seed,
            "timings": GenerateTimings(
                queue_seconds=usage.queue_seconds,
                time_to_first_token_seconds=usage.first_token_seconds,
                total_seconds=usage.total_seconds,
            ),
        }
    return kind(
        text="".join(event.text for event in events),
        tokens=[token for event in events for token in event.tokens],
        token_texts=[text for event in events for text in event.token_texts],
        **fields,
    )


def has_content(event: GenerationEvent) -> bool:
    """Whether a stream shows the event."""
    return bool(event.text or event.tokens or event.logprobs or event.finish_reason)
