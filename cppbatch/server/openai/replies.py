"""OpenAI's answer objects for completions and chat, whole and streamed."""

from __future__ import annotations

import time
from abc import abstractmethod

from cppbatch.chat.chat_format import PreparedChat
from cppbatch.chat.deltas import ArgumentsDelta, Delta, ReasoningDelta, TextDelta, ToolCallStart
from cppbatch.engine.best_of import mean_logprob
from cppbatch.engine.request import GenerationEvent, TokenLogprob
from cppbatch.server.assistant_output import AssistantOutput
from cppbatch.server.openai.schemas import ChatRequest, CompletionRequest
from cppbatch.server.response import DONE, Json, ResponseBuilder, ServerSentEvent
from cppbatch.server.response_logprobs import ChatLogprobs, CompletionLogprobs, chat_token_logprobs, completion_logprobs
from cppbatch.server.serving import new_id


class ChoicesReply(ResponseBuilder):
    """What both families share: choices with a finish reason, and usage.

    Of each prompt's `n_candidates` completions, the `n_choices` likeliest are choices.
    """

    def __init__(self, body: CompletionRequest | ChatRequest, model: str, *, prefix: str, kind: str) -> None:
        super().__init__(n_candidates=body.n_candidates)
        self.id = new_id(prefix)
        self._kind = kind
        self._model = model
        self._created = int(time.time())
        self._n = body.n_choices
        self._include_usage = bool(body.stream_options and body.stream_options.include_usage)

    def build(self, completions: list[list[GenerationEvent]]) -> Json:
        """As in `ResponseBuilder`."""
        logprobs = [[entry for event in events for entry in event.logprobs] for events in completions]
        choices = [
            self._choice(index, self._body(i, completions[i]), logprobs[i], ended=i)
            for index, i in enumerate(self._best(logprobs))
        ]
        return self._object(choices) | {"usage": self.usage()}

    def stream_end(self) -> list[ServerSentEvent]:
        """As in `ResponseBuilder`; with `include_usage` a chunk without choices comes first."""
        usage = (
            [ServerSentEvent(self._object([], streamed=True) | {"usage": self.usage()})] if self._include_usage else []
        )
        return [*usage, DONE]

    def stream_error(self, error: Exception) -> list[ServerSentEvent]:
        """As in `ResponseBuilder`."""
        return [*super().stream_error(error), DONE]

    def usage(self) -> Json:
        """OpenAI's usage object."""
        prompt, cached, completion = self.token_counts()
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    @abstractmethod
    def _body(self, index: int, events: list[GenerationEvent]) -> Json:
        """What a whole completion says."""

    @abstractmethod
    def _logprobs(self, entries: list[TokenLogprob]) -> object:
        """Log-probabilities as the family shows them, None if they are not wanted."""

    def _best(self, logprobs: list[list[TokenLogprob]]) -> list[int]:
        """Which completions are shown, in order."""
        if self._n == self.n_candidates:
            return list(range(len(logprobs)))

        def badness(i: int) -> float:
            usage = self.last_events[i].usage
            return -mean_logprob(logprobs[i], usage.completion_tokens if usage else 0)

        groups = range(0, len(logprobs), self.n_candidates)
        return [i for first in groups for i in sorted(range(first, first + self.n_candidates), key=badness)[: self._n]]

    @abstractmethod
    def _finish_reason(self, index: int) -> str | None:
        """Why this completion has ended."""

    def _chunk(self, index: int, body: Json, logprobs: list[TokenLogprob] | None = None) -> ServerSentEvent:
        return ServerSentEvent(self._object([self._choice(index, body, logprobs)], streamed=True))

    def _last_chunk(self, index: int, body: Json) -> ServerSentEvent:
        return ServerSentEvent(self._object([self._choice(index, body, ended=index)], streamed=True))

    def _choice(
        self, index: int, body: Json, logprobs: list[TokenLogprob] | None = None, *, ended: int | None = None
    ) -> Json:
        """`ended`: the completion that ends with this choice."""
        shown = None if logprobs is None else self._logprobs(logprobs)
        choice: Json = {"index": index, **body, "logprobs": shown, "finish_reason": None}
        if ended is not None:
            choice |= {"finish_reason": self._finish_reason(ended), "seed": self.last_events[ended].seed}
        return choice

    def _object(self, choices: list[Json], *, streamed: bool = False) -> Json:
        kind = f"{self._kind}.chunk" if streamed and self._kind == "chat.completion" else self._kind
        return {"id": self.id, "object": kind, "created": self._created, "model": self._model, "choices": choices}


class CompletionReply(ChoicesReply):
    """`/v1/completions`."""

    def __init__(self, body: CompletionRequest, model: str) -> None:
        super().__init__(body, model, prefix="cmpl-", kind="text_completion")
        self._wants_logprobs = body.logprobs is not None

    def stream_events(self, index: int, event: GenerationEvent) -> list[ServerSentEvent]:
        """As in `ResponseBuilder`."""
        news = (
            [self._chunk(index, {"text": event.text}, event.logprobs or None)] if event.text or event.logprobs else []
        )
        return [*news, self._last_chunk(index, {"text": ""})] if event.finish_reason else news

    def _body(self, index: int, events: list[GenerationEvent]) -> Json:
        return {"text": "".join(event.text for event in events)}

    def _logprobs(self, entries: list[TokenLogprob]) -> CompletionLogprobs | None:
        return completion_logprobs(entries) if self._wants_logprobs else None

    def _finish_reason(self, index: int) -> str | None:
        reason = self.last_events[index].finish_reason
        return reason and reason.value


class ChatReply(ChoicesReply):
    """`/v1/chat/completions`."""

    def __init__(self, body: ChatRequest, model: str, turn: PreparedChat) -> None:
        super().__init__(body, model, prefix="chatcmpl-", kind="chat.completion")
        self._wants_logprobs = bool(body.wants_logprobs)
        self._turn = turn
        self._assistants: dict[int, AssistantOutput] = {}

    def stream_events(self, index: int, event: GenerationEvent) -> list[ServerSentEvent]:
        """As in `ResponseBuilder`: the first chunk of a choice names the role, the last one has the finish reason."""
        frames = []
        if index not in self._assistants:
            self._assistants[index] = AssistantOutput(self._turn)
            frames.append(self._chunk(index, {"delta": {"role": "assistant", "content": ""}}))
        pieces = self._assistants[index].read(event)
        logprobs = event.logprobs or None  # of all the event's tokens, those of tags too
        for delta in [_delta(piece) for piece in pieces] or ([{"content": ""}] if logprobs else []):
            frames.append(self._chunk(index, {"delta": delta}, logprobs))
            logprobs = None
        if event.finish_reason:
            frames.append(self._last_chunk(index, {"delta": {}}))
        return frames

    def _body(self, index: int, events: list[GenerationEvent]) -> Json:
        assistant = self._assistants[index] = AssistantOutput(self._turn)
        for event in events:
            assistant.read(event)
        said = assistant.message
        content = said.text if said.text or not said.calls else None
        message: Json = {"role": "assistant", "content": content, "refusal": None}
        if said.reasoning:
            message["reasoning_content"] = said.reasoning
        if said.calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in said.calls
            ]
        return {"message": message}

    def _logprobs(self, entries: list[TokenLogprob]) -> ChatLogprobs | None:
        return ChatLogprobs(content=chat_token_logprobs(entries)) if self._wants_logprobs else None

    def _finish_reason(self, index: int) -> str | None:
        return self._assistants[index].finish_reason


def _delta(piece: Delta) -> Json:
    """`delta` of a chunk."""
    if isinstance(piece, TextDelta):
        return {"content": piece.text}
    if isinstance(piece, ReasoningDelta):
        return {"reasoning_content": piece.text}
    call: Json = {"index": piece.index}
    if isinstance(piece, ToolCallStart):
        call |= {"id": piece.id, "type": "function", "function": {"name": piece.name, "arguments": ""}}
    elif isinstance(piece, ArgumentsDelta):
        call["function"] = {"arguments": piece.text}
    return {"tool_calls": [call]}
