"""OpenAI's response objects, whole and streamed."""

from __future__ import annotations

import time

import msgspec

from cppbatch.chat.chat_format import PreparedChat
from cppbatch.engine.params import SamplingParams
from cppbatch.engine.request import GenerationEvent
from cppbatch.server.api_errors import api_error
from cppbatch.server.assistant_output import AssistantOutput
from cppbatch.server.content_blocks import ContentBlocks
from cppbatch.server.response import Json, ResponseBuilder, ServerSentEvent
from cppbatch.server.responses.items import Items
from cppbatch.server.responses.schemas import ResponsesRequest, ResponseToolChoice
from cppbatch.server.serving import new_id


class ResponseReply(ResponseBuilder):
    """`/v1/responses`."""

    def __init__(self, body: ResponsesRequest, model: str, turn: PreparedChat, params: SamplingParams) -> None:
        super().__init__()
        self.id = new_id("resp_")
        self._created = int(time.time())
        self._echo = _echo(body, model, params)
        self._assistant = AssistantOutput(turn)
        self._parts = ContentBlocks()
        self._items = Items(wants_logprobs=body.wants_logprobs)
        self._n_frames = 0

    def build(self, completions: list[list[GenerationEvent]]) -> Json:
        """As in `ResponseBuilder`."""
        for event in completions[0]:
            self._read(event)
        return self._ended()

    def stream_start(self) -> list[ServerSentEvent]:
        """As in `ResponseBuilder`."""
        started = self._response("in_progress")
        return self._frames(
            {"type": "response.created", "response": started}, {"type": "response.in_progress", "response": started}
        )

    def stream_events(self, index: int, event: GenerationEvent) -> list[ServerSentEvent]:
        """As in `ResponseBuilder`."""
        return self._frames(*self._read(event))

    def stream_end(self) -> list[ServerSentEvent]:
        """As in `ResponseBuilder`."""
        response = self._ended()
        return self._frames({"type": f"response.{response['status']}", "response": response})

    def stream_error(self, error: Exception) -> list[ServerSentEvent]:
        """As in `ResponseBuilder`: what was said until then is in it."""
        fault = api_error(error)
        code = "server_error" if fault.status >= 500 else "invalid_prompt"
        self._items.change(self._parts.close(), status="incomplete")
        response = self._response("failed") | {"error": {"code": code, "message": fault.message}}
        return self._frames({"type": "response.failed", "response": response})

    def _read(self, event: GenerationEvent) -> list[Json]:
        """What an event brings, as events of the API."""
        news = self._items.change(self._parts.read(self._assistant.read(event)), event.logprobs)
        if event.finish_reason:
            news += self._items.change(self._parts.close(), status=self._status())
        return news

    def _frames(self, *events: Json) -> list[ServerSentEvent]:
        frames = []
        for event in events:
            frames.append(
                ServerSentEvent({"type": event["type"], "sequence_number": self._n_frames, **event}, event["type"])
            )
            self._n_frames += 1
        return frames

    def _status(self) -> str:
        return "completed" if self._assistant.finish_reason in ("stop", "tool_calls") else "incomplete"

    def _ended(self) -> Json:
        response = self._response(self._status()) | {"usage": self._usage()}
        if response["status"] == "completed":
            return response | {"completed_at": int(time.time())}
        reason = "max_output_tokens" if self._assistant.finish_reason == "length" else self._assistant.finish_reason
        return response | {"incomplete_details": {"reason": reason}}

    def _response(self, status: str) -> Json:
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "completed_at": None,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "output": self._items.shown(),
            "usage": None,
            **self._echo,
        }

    def _usage(self) -> Json:
        prompt, cached, completion = self.token_counts()
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": completion,
            "output_tokens_details": {"reasoning_tokens": self._assistant.reasoning_tokens},
            "total_tokens": prompt + completion,
        }


def _echo(body: ResponsesRequest, model: str, params: SamplingParams) -> Json:
    """What was asked for, as it is done: nothing is stored, and nothing left out of a prompt."""
    choice = body.tool_choice or "auto"
    return {
        "model": model,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "background": False,
        "store": False,
        "temperature": params.temperature,
        "text": {"format": _format(body)},
        "tool_choice": msgspec.to_builtins(choice) if isinstance(choice, ResponseToolChoice) else choice,
        "tools": [_tool(tool) for tool in body.functions()],
        "top_logprobs": params.logprobs or 0,
        "top_p": params.top_p,
        "truncation": "disabled",
        "user": body.user,
    }


def _format(body: ResponsesRequest) -> Json:
    form: Json = {"type": body.format.type, **msgspec.to_builtins(body.format)}
    return form if form["type"] != "json_schema" else {"name": "answer", **form}


def _tool(tool: Json) -> Json:
    return {"type": "function", "description": None, "parameters": None, "strict": None, **tool["function"]}
