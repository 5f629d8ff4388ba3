"""Converts the events of a request to the format of llama-cpp-python's results."""

from __future__ import annotations

import base64
import codecs
import time
import uuid
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from llama_cpp import llama_chat_format

from cppbatch.chat.chat_format import PreparedChat
from cppbatch.chat.output_parser import Delta, ReasoningDelta, TextDelta, ToolCallStart, openai_message
from cppbatch.engine.chats import AssistantOutput, ChatOptions, ChatRequests
from cppbatch.engine.media.sources import prompt_of_chat
from cppbatch.engine.params import SamplingParams, replace_fields
from cppbatch.engine.request import FinishReason, GenerationEvent, TokenLogprob
from cppbatch.errors import GenerationFailed, InvalidRequest
from cppbatch.llama_cpp_python.arguments import Callbacks

if TYPE_CHECKING:
    from cppbatch.llama_cpp_python.llama import Llama


Json = dict[str, Any]

_FINISH_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


class Kept:
    """The events of a request, until its stopping criteria are met.

    Iteration raises the exceptions of logits processors and stopping criteria, and `GenerationFailed`.
    """

    def __init__(
        self, llama: object, events: Generator[GenerationEvent, None, None], callbacks: Callbacks | None, n_prompt: int
    ) -> None:
        """`llama`: a reference to the `Llama` object, which closes its engine when it is garbage-collected."""
        self._llama = llama
        self._events, self._callbacks, self.n_prompt = events, callbacks, n_prompt
        self.n_tokens = 0
        """Tokens so far, without an end token."""
        self.has_end_token = False

    def __iter__(self) -> Iterator[GenerationEvent]:
        text = texts = ""
        for event in map(_readable, self._events):
            self._check(event)
            n, left = len(event.tokens), self._n_left()
            if left is not None and (left < n or event.finish_reason):
                n = min(left, n)
                texts += "".join(event.token_texts[:n])
                self.n_tokens += n
                yield msgspec.structs.replace(
                    event, text=texts[len(text) :], tokens=event.tokens[:n], logprobs=event.logprobs[:n],
                    finish_reason=FinishReason.STOP,
                )  # fmt: skip
                self.close()
                return
            text, texts, self.n_tokens = text + event.text, texts + "".join(event.token_texts), self.n_tokens + n
            if event.finish_reason and event.usage:
                self.has_end_token = event.usage.completion_tokens > self.n_tokens
            yield event

    def _n_left(self) -> int | None:
        """The number of tokens until the criteria were met; None if they are not met."""
        n_kept = self._callbacks.n_kept if self._callbacks else None
        return None if n_kept is None else max(0, n_kept - self.n_prompt - self.n_tokens)

    def tokens(self, *, end: int) -> Iterator[int]:
        """The token ids, with `end` instead of an end token of the model."""
        for event in self:
            yield from event.tokens
        if self.has_end_token:
            yield end

    def close(self) -> None:
        """Cancels the request if it has not ended."""
        self._events.close()

    def _check(self, event: GenerationEvent) -> None:
        if event.finish_reason in (None, *_FINISH_REASONS):
            return
        if self._callbacks and self._callbacks.error:
            raise self._callbacks.error
        assert event.finish_reason is not None
        raise GenerationFailed(event.error or f"the request ended: {event.finish_reason.value}")


class _Model(Protocol):
    model_path: str

    def detokenize(self, tokens: list[int], prev_tokens: list[int] | None = None, special: bool = False) -> bytes: ...
    def token_bos(self) -> int: ...


class Completion:
    """One call of `create_completion`."""

    def __init__(self, llama: _Model, given: Json, prompt_tokens: list[int], *, after: str = "") -> None:
        """`after`: text appended to the model's."""
        self._tokens, self._after = prompt_tokens, after
        prompt = given["prompt"]
        self._n_before = len(prompt)  # as in llama-cpp-python: characters of a text, or token ids
        self._is_scored, self._is_stream = given["logprobs"] is not None, given["stream"]
        self._shown = ""
        self._n_special = self._n_hidden = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("ignore")
        if given["echo"] and not given["stream"]:
            self._shown = prompt if isinstance(prompt, str) else _text(llama.detokenize(prompt))
            if self._is_scored:
                self._n_special, self._n_before = int(prompt_tokens[:1] == [llama.token_bos()]), 0
                pieces = (llama.detokenize([token], special=True) for token in prompt_tokens)
                self._n_hidden = len(_text(b"".join(pieces)))
        self._starts_line = not prompt_tokens or prompt == ""
        self._head = {
            "id": f"cmpl-{uuid.uuid4()}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": given["model"] if given["model"] is not None else llama.model_path,
        }

    def with_echo(self, params: SamplingParams) -> SamplingParams:
        """The parameters, with scoring of the prompt if the result includes it with log-probabilities."""
        return replace_fields(params, echo=True) if self._n_hidden else params

    def whole(self, kept: Kept) -> Json:
        """The result of a request."""
        text, logprobs, reason = "", list[TokenLogprob](), None
        for event in kept:
            text += event.text
            logprobs += event.logprobs
            reason = event.finish_reason
        text = text[self._n_hidden :]
        if self._starts_line:
            text = text.removeprefix(" ")
        n_scored = kept.n_tokens + (len(self._tokens) if self._n_hidden else 0)
        n_prompt = len(self._tokens)
        usage = {
            "prompt_tokens": n_prompt,
            "completion_tokens": kept.n_tokens,
            "total_tokens": n_prompt + kept.n_tokens,
        }
        choice = self._choice(self._shown + text + self._after, logprobs[self._n_special : n_scored], reason)
        return {**self._head, "choices": [choice], "usage": usage}

    def chunks(self, kept: Kept) -> Iterator[Json]:
        """The chunks of a stream; the last one has the finish reason and no text."""
        reason, is_first = None, self._starts_line
        try:
            for event in kept:
                reason = event.finish_reason
                for text, logprobs in self._tokens_of(event):
                    shown, is_first = text.removeprefix(" ") if is_first else text, is_first and not text
                    if shown or logprobs:
                        yield {**self._head, "choices": [self._choice(shown, logprobs, None)]}
        finally:
            kept.close()
        yield {**self._head, "choices": [self._choice("", [], reason)]}

    @staticmethod
    def _tokens_of(event: GenerationEvent) -> Iterator[tuple[str, list[TokenLogprob]]]:
        """The text of each token, with its log-probabilities; the whole event at once if some text is held back."""
        logprobs = event.logprobs[: len(event.tokens)]
        if "".join(event.token_texts) != event.text or not event.tokens:
            yield event.text, logprobs
            return
        for i, text in enumerate(event.token_texts):
            yield text, logprobs[i : i + 1]

    def _choice(self, text: str, entries: list[TokenLogprob], reason: FinishReason | None) -> Json:
        logprobs = None
        if self._is_scored and (entries or not self._is_stream):
            logprobs = logprobs_of(entries)
            logprobs["text_offset"] = [self._offset(entry.piece) for entry in entries]
            if self._n_hidden:  # as in OpenAI's API, even if another token precedes it
                logprobs["token_logprobs"][0] = logprobs["top_logprobs"][0] = None
        shown = reason and _FINISH_REASONS[reason]
        return {"text": text, "index": 0, "logprobs": logprobs, "finish_reason": shown}

    def _offset(self, piece: bytes) -> int:
        """The text offset of the next token."""
        start, self._n_before = self._n_before, self._n_before + len(self._decoder.decode(piece))
        return start


def logprobs_of(entries: list[TokenLogprob]) -> Json:
    """The log-probabilities in llama-cpp-python's format."""
    texts = [_text(entry.piece) for entry in entries]
    tops: list[dict[str, float | None]] = [
        {**{_text(piece): logprob for _, piece, logprob in entry.top}, text: entry.logprob}
        for entry, text in zip(entries, texts, strict=True)
    ]
    return {
        "tokens": texts,
        "text_offset": [entry.text_offset for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": tops,
    }


def _readable(event: GenerationEvent) -> GenerationEvent:
    """The event without invalid UTF-8 bytes: llama-cpp-python omits them, the engine returns them as U+FFFD."""
    if "\ufffd" not in event.text and not any("\ufffd" in text for text in event.token_texts):
        return event
    texts = [text.replace("\ufffd", "") for text in event.token_texts]
    return msgspec.structs.replace(event, text=event.text.replace("\ufffd", ""), token_texts=texts)


def _text(piece: bytes) -> str:
    return piece.decode("utf-8", "ignore")


# --- chats -----------------------------------------------------------------------------------------------------------
# Chats with a template: a handler like those of llama-cpp-python's formats, based on the engine's chat formats.


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
        llama: Llama,
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
            tokens = _tokens(llama, requests.request("", messages, None).chat)
            return llama_chat_format._convert_completion_to_chat(
                llama.create_completion(tokens, stream=stream, logprobs=shown, **given), stream=stream
            )
        if schema is not None:
            given |= {"grammar": None, "json_schema": schema}
        given["logprobs"] = shown
        params, callbacks = llama.sampling(given)
        made = requests.request("", messages, params)
        prompt = made.request.prompt if made.chat.parts else _tokens(llama, made.chat)
        try:
            kept = llama.start(prompt, made.request.params, callbacks)
        except InvalidRequest as error:
            raise made.rename_field(error) from error
        model = given["model"] if given["model"] is not None else llama.model_path
        answer = _Answer(made.chat, model, is_scored=shown is not None)
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


def _tokens(llama: Llama, chat: PreparedChat) -> list[int]:
    """The tokens of a rendered conversation, which already contains its special tokens."""
    if chat.parts:
        return [piece.id for piece in llama.engine.tokens(prompt_of_chat(chat))]
    tokens: list[int] = llama.tokenize(chat.prompt.encode("utf-8"), add_bos=False, special=True)
    return tokens


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
