"""Chats with a template: a handler like those of llama-cpp-python's formats, based on the engine's chat formats."""

from __future__ import annotations

import base64
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from llama_cpp import llama_chat_format

from cppbatch.chat.chat_format import PreparedChat
from cppbatch.chat.output_parser import Delta, ReasoningDelta, TextDelta, ToolCallStart, openai_message
from cppbatch.engine.chats import AssistantOutput, ChatOptions, ChatRequests
from cppbatch.engine.engine import BatchInferenceEngine
from cppbatch.engine.media.sources import prompt_of_chat
from cppbatch.engine.params import SamplingParams
from cppbatch.engine.request import Prompt, TokenLogprob
from cppbatch.errors import client_names
from cppbatch.llama_cpp_python.arguments import Callbacks
from cppbatch.llama_cpp_python.completions import Kept, logprobs_of

Json = dict[str, Any]


class _Llama(Protocol):
    """The part of `Llama` that answers a conversation."""

    engine: BatchInferenceEngine
    model_path: str
    create_completion: Callable[..., Any]
    tokenize: Callable[..., list[int]]

    def sampling(self, given: Json) -> tuple[SamplingParams, Callbacks | None]: ...
    def start(self, prompt: Prompt, params: SamplingParams, callbacks: Callbacks | None) -> Kept: ...


class TemplateHandler:
    """Answers conversations with a chat template.

    With tools, a response format or images, the answer is parsed: calls become `tool_calls`, reasoning becomes
    `reasoning_content`. Otherwise the content is the model's complete output, as in llama-cpp-python.
    """

    def __init__(self, template: str | None, *, plain: Any = None, images: Any = None) -> None:
        """`template`: None for the model's own. `plain`: another handler, for answers that do not need parsing.
        `images`: a llama-cpp-python handler, which loads images."""
        self._template, self._plain, self._images = template, plain, images

    def __call__(
        self,
        *,
        llama: _Llama,
        messages: list[Json],
        functions: list[Json] | None = None,
        function_call: Any = None,
        tools: list[Json] | None = None,
        tool_choice: Any = None,
        response_format: Json | None = None,
        stream: bool = False,
        logprobs: bool | None = None,
        top_logprobs: int | None = None,
        **given: Any,
    ) -> Any:
        """Answers a chat with the arguments of llama-cpp-python's `LlamaChatCompletionHandler`."""
        if functions is not None:
            tools = [{"type": "function", "function": function} for function in functions]
        if isinstance(function_call, dict):
            tool_choice = {"type": "function", "function": {"name": function_call["name"]}}
        elif function_call is not None:
            tool_choice = function_call
        schema = _schema(response_format)
        shown = (top_logprobs or 0) if logprobs else None
        if self._plain and not tools and schema is None:
            given |= {"logprobs": logprobs, "top_logprobs": top_logprobs}
            return self._plain(llama=llama, messages=messages, stream=stream, **given)
        options: ChatOptions = {"continue_final_message": False, "tools": tools or ()}
        if tools and tool_choice is not None:
            options["tool_choice"] = tool_choice
        requests = ChatRequests(llama.engine.chat_format(self._template), options)
        if self._images:
            messages = self._with_images(messages)
        if not (tools or schema is not None or self._images):
            tokens = _tokens(llama, requests.request("", messages, None)[1])
            return llama_chat_format._convert_completion_to_chat(
                llama.create_completion(tokens, stream=stream, logprobs=shown, **given), stream=stream
            )
        if schema is not None:
            given |= {"grammar": None, "json_schema": schema}
        given["logprobs"] = shown
        params, callbacks = llama.sampling(given)
        request, chat = requests.request("", messages, params)
        prompt = request.prompt if chat.parts else _tokens(llama, chat)
        with client_names(chat.field_names):
            kept = llama.start(prompt, request.params, callbacks)
        model = given["model"] if given["model"] is not None else llama.model_path
        answer = _Answer(chat, model, is_scored=shown is not None)
        return answer.chunks(kept) if stream else answer.whole(kept)

    def _with_images(self, messages: list[Json]) -> list[Json]:
        """The conversation as an image handler would render it: with its system message, images before the text if its
        format requires it, and their bytes instead of URLs."""
        handler = self._images
        system = getattr(handler, "DEFAULT_SYSTEM_MESSAGE", None)
        if system and not any(message["role"] == "system" and message["content"] for message in messages):
            messages = [{"role": "system", "content": system}, *messages]
        return [
            {**message, "content": self._load_images(message["content"])}
            if isinstance(message.get("content"), list)
            else message
            for message in messages
        ]

    def _load_images(self, parts: list[Json]) -> list[Json]:
        if self._template:
            parts = sorted(parts, key=lambda part: part["type"] != "image_url")
        return [_load_image(self._images, part) if part["type"] == "image_url" else part for part in parts]


def _load_image(handler: Any, part: Json) -> Json:
    given = part["image_url"]
    data = base64.b64encode(handler.load_image(given if isinstance(given, str) else given["url"])).decode()
    return {"type": "image_url", "image_url": f"data:image;base64,{data}"}


def _tokens(llama: _Llama, chat: PreparedChat) -> list[int]:
    """The tokens of a rendered conversation, which already contains its special tokens."""
    if chat.parts:
        return [piece.id for piece in llama.engine.tokens(prompt_of_chat(chat))]
    return llama.tokenize(chat.prompt.encode("utf-8"), add_bos=False, special=True)


class _Answer:
    """A parsed answer in llama-cpp-python's format."""

    def __init__(self, chat: PreparedChat, model: str, *, is_scored: bool) -> None:
        self._output, self._is_scored = AssistantOutput(chat), is_scored
        self._head = {"id": f"chatcmpl-{uuid.uuid4()}", "created": int(time.time()), "model": model}

    def whole(self, kept: Kept) -> Json:
        """The result of a request."""
        entries: list[TokenLogprob] = []
        for event in kept:
            self._output.read(event)
            entries += event.logprobs
        said = self._output.message
        message = openai_message(said.text, said.reasoning, said.calls)
        if said.calls:  # OpenAI's format until 2023, which llama-cpp-python also returns
            message["function_call"] = dict(message["tool_calls"][0]["function"])
        choice = self._choice(message, "message", entries[: kept.n_tokens])
        usage = {"prompt_tokens": kept.n_prompt, "completion_tokens": kept.n_tokens}
        usage["total_tokens"] = sum(usage.values())
        return {**self._head, "object": "chat.completion", "choices": [choice], "usage": usage}

    def chunks(self, kept: Kept) -> Iterator[Json]:
        """The chunks of a stream: the role, the deltas, and the finish reason."""
        yield self._chunk({"role": "assistant"}, [])
        try:
            for event in kept:
                entries = event.logprobs[: len(event.tokens)]
                for delta in self._output.read(event):
                    yield self._chunk(self._delta(delta), entries)
                    entries = []
        finally:
            kept.close()
        yield self._chunk({}, [])

    def _delta(self, delta: Delta) -> Json:
        if isinstance(delta, TextDelta):
            return {"content": delta.text}
        if isinstance(delta, ReasoningDelta):
            return {"reasoning_content": delta.text}
        if isinstance(delta, ToolCallStart):
            function = {"name": delta.name, "arguments": ""}
            call: Json = {"index": delta.index, "id": delta.id, "type": "function", "function": function}
        else:
            function = {"arguments": delta.text}
            call = {"index": delta.index, "function": function}
        return {"tool_calls": [call]} | ({} if delta.index else {"function_call": dict(function)})

    def _chunk(self, delta: Json, entries: list[TokenLogprob]) -> Json:
        is_last = not delta
        choice = self._choice(delta, "delta", entries) | ({} if is_last else {"finish_reason": None})
        return {**self._head, "object": "chat.completion.chunk", "choices": [choice]}

    def _choice(self, said: Json, name: str, entries: list[TokenLogprob]) -> Json:
        scored = logprobs_of(entries) if self._is_scored and entries else None
        logprobs = llama_chat_format._convert_text_completion_logprobs_to_chat(scored)
        return {"index": 0, name: said, "logprobs": logprobs, "finish_reason": self._output.finish_reason}


def _schema(response_format: Json | None) -> Any:
    """The JSON schema of a response format; None for free text."""
    if response_format is None or response_format.get("type", "text") == "text":
        return None
    named = response_format.get("json_schema") or {}
    return named.get("schema") or response_format.get("schema") or {"type": "object"}
