"""The conversation of `cppbatch chat`: messages, commands, files; independent of a terminal."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import msgspec

from cppbatch.chat.media_parts import MediaKind
from cppbatch.chat.messages import ChatMessage, conversation_of
from cppbatch.chat.template import NO_TEMPLATE
from cppbatch.cli.chat.backends import FULL, AnswerEnd, ChatBackend
from cppbatch.engine.media.sources import file_part
from cppbatch.errors import ConfigError, CppBatchError
from cppbatch.regular_files import is_model, is_stream, replace_file
from cppbatch.typed_json import convert

Json = dict[str, Any]

COMMANDS: Mapping[str, str] = {
    "/system": "[TEXT|off]  show, set or remove the system message",
    "/image": "FILE  attach an image to the next message",
    "/audio": "FILE  attach audio to the next message",
    "/retry": "regenerate the last answer",
    "/clear": "start a new conversation; the system message is kept",
    "/save": "FILE  save the conversation as Markdown (.md) or JSON (any other extension)",
    "/model": "[NAME]  list the models, or switch to another one",
    "/help": "show this help",
    "/quit": "quit (also Ctrl-D)",
}


class ChatView(Protocol):
    """Shows what happens in a conversation."""

    def begin(self) -> None:
        """An answer starts."""

    def add(self, text: str, reasoning: str) -> None:
        """The answer has a new part."""

    def end(self, summary: str) -> None:
        """The answer has ended. `summary`: its length and speed."""

    def say(self, line: str) -> None:
        """A line about the conversation."""

    def fail(self, line: str) -> None:
        """Something failed; the conversation continues."""


class ChatSession:
    """One conversation with a model."""

    def __init__(
        self,
        backend: ChatBackend,
        view: ChatView,
        *,
        system: str | None = None,
        params: Json | None = None,
        longest: int | None = None,
        save_to: Path | None = None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        """`params`: fields of `SamplingParams` for each answer. `longest`: maximum tokens of an answer.
        `save_to`: written after each answer."""
        self._backend, self._view = backend, view
        self._system, self._params, self._save_to, self._clock = system, params or {}, save_to, clock
        self._turns: list[Json] = []
        self._unanswered: Json | None = None
        self._attached: list[Json] = []
        self._longest = longest
        self.n_failed = 0
        """Failed messages and commands."""

    @property
    def messages(self) -> list[Json]:
        """The conversation, as OpenAI's objects."""
        system = [{"role": "system", "content": self._system}] if self._system else []
        return [*system, *self._turns]

    def take_up(self, messages: list[Json]) -> None:
        """Continues a saved conversation. A system message that is already set replaces the saved one."""
        first = messages[0] if messages else {}
        if first.get("role") in ("system", "developer"):
            messages = messages[1:]
            self._system = self._system or str(first.get("content") or "")
        self._turns = messages

    def say_what_model_lacks(self) -> None:
        """A line for a model without a chat template."""
        if not self._backend.has_template:
            self._view.say(NO_TEMPLATE)

    def handle(self, line: str) -> bool:
        """Answers a message or runs a command (`/name`). Returns False if the program should end.

        A leading double slash stands for a literal slash. Errors are shown.
        """
        try:
            if line.startswith("/") and not line.startswith("//"):
                return self._command(line)
            if line.strip():
                self._answer(self._user_message(line[1:] if line.startswith("//") else line))
        except CppBatchError as error:
            self._fail(str(error))
        return True

    def _user_message(self, text: str) -> Json:
        attached, self._attached = self._attached, []
        return {"role": "user", "content": [*attached, {"type": "text", "text": text}] if attached else text}

    def _fail(self, line: str) -> None:
        self.n_failed += 1
        self._view.fail(line)

    # --- answers ------------------------------------------------------------------------------------------------------

    def _answer(self, message: Json, params: Json | None = None) -> None:
        """Adds a message and its answer. Ctrl-C stops the answer; the text so far stays in the conversation."""
        self._unanswered = message
        asked = [{name: value for name, value in each.items() if name != "reasoning_content"} for each in self.messages]
        answer = _Answer(self._clock)
        parts = self._backend.answer([*asked, message], self._params if params is None else params)
        stopped = False
        self._view.begin()
        try:
            for part in parts:
                answer.add(part.text, part.reasoning, part.n_tokens)
                self._view.add(part.text, part.reasoning)
                answer.end = part.end
                if self._longest and answer.n_tokens >= self._longest and not part.end:  # some models never end
                    answer.end = AnswerEnd(finish_reason="length", n_tokens=answer.n_tokens)
                    break
        except KeyboardInterrupt:
            stopped = True
        finally:
            parts.close()
            self._view.end(answer.summary(stopped=stopped))
        if not (answer.text or answer.reasoning) and stopped:
            return
        self._unanswered = None
        self._turns += [message, answer.message]
        if self._save_to:
            write_messages(self._save_to, self.messages)
        self._say_why_it_ended(answer)

    def _say_why_it_ended(self, answer: _Answer) -> None:
        if not answer.end:
            return
        if answer.end.finish_reason == "length":
            limit = self._params.get("max_tokens") or self._longest
            is_limit = limit is not None and (answer.end.n_tokens is None or answer.end.n_tokens >= limit)
            self._view.say(f"cut off after {limit:,} tokens (-n)" if is_limit else f"cut off, because {FULL}")
        elif not answer.text and not answer.reasoning:
            self._view.say("the model ended the answer with its first token; use /retry to try again")

    # --- commands -----------------------------------------------------------------------------------------------------

    def _command(self, line: str) -> bool:
        name, _, argument = line.strip().partition(" ")
        name, argument = {"/exit": "/quit", "/?": "/help"}.get(name, name), argument.strip()
        if name not in COMMANDS:
            raise CppBatchError(
                f"unknown command {name}; see /help for a list, or start a message with // for a literal slash"
            )
        if name == "/quit":
            return False
        commands: Mapping[str, Callable[[str], None]] = {
            "/system": self._set_system, "/image": self._attach_image, "/audio": self._attach_audio,
            "/retry": self._retry, "/clear": self._clear, "/save": self._save, "/model": self._choose_model,
            "/help": self._help,
        }  # fmt: skip
        commands[name](argument)
        return True

    def _set_system(self, text: str) -> None:
        if text:
            self._system = None if text == "off" else text
        self._view.say(f"system message: {self._system}" if self._system else "no system message is set")

    def _attach_image(self, name: str) -> None:
        self._attach("image", name)

    def _attach_audio(self, name: str) -> None:
        self._attach("audio", name)

    def _attach(self, kind: MediaKind, name: str) -> None:
        if not name:
            raise CppBatchError(f"/{kind} requires a file")
        try:
            data = Path(name).expanduser().read_bytes()
        except OSError as error:
            raise CppBatchError(f"{name} cannot be read: {error.strerror}") from error
        self._attached.append(file_part(kind, data))
        self._view.say(f"{name} is attached to the next message")

    def _retry(self, _: str) -> None:
        before, unanswered = self._turns, self._unanswered
        message = unanswered
        if message is None:
            last = next((i for i in reversed(range(len(before))) if before[i].get("role") == "user"), None)
            if last is None:
                raise CppBatchError("no answer to regenerate; send a message first")
            message, self._turns = before[last], before[:last]
        try:  # the same seed would give the same answer
            self._answer(message, {name: value for name, value in self._params.items() if name != "seed"})
        finally:
            if self._unanswered is not None:  # no answer: the conversation is unchanged
                self._turns, self._unanswered = before, unanswered

    def _clear(self, _: str) -> None:
        self._turns, self._unanswered, self._attached = [], None, []
        self._view.say("started a new conversation")

    def _save(self, name: str) -> None:
        if not name:
            raise CppBatchError("/save requires a file: /save talk.md, or /save talk.json")
        path = Path(name).expanduser()
        write_messages(path, self.messages)
        self._view.say(f"saved {len(self._turns)} messages to {path}")

    def _choose_model(self, name: str) -> None:
        if name:
            self._backend.use(name)
            self._view.say(f"now using {self._backend.model}")
            self.say_what_model_lacks()
            return
        lines = [f"{'*' if each == self._backend.model else ' '} {each}" for each in self._backend.models()]
        self._view.say("\n".join([f"using {self._backend.model}; switch with /model NAME", *lines]))

    def _help(self, _: str) -> None:
        self._view.say("\n".join(f"{name:<8} {what}" for name, what in COMMANDS.items()))


class _Answer:
    """An answer while it arrives, and its times."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._began = clock, clock()
        self._first: float | None = None
        self._last = 0.0
        self.n_tokens = 0
        self.text = self.reasoning = ""
        self.end: AnswerEnd | None = None

    def add(self, text: str, reasoning: str, n_tokens: int) -> None:
        self.text, self.reasoning = self.text + text, self.reasoning + reasoning
        self.n_tokens += n_tokens
        if n_tokens:
            self._last = self._clock()
            self._first = self._first or self._last

    @property
    def message(self) -> Json:
        """OpenAI's object."""
        reasoning = {"reasoning_content": self.reasoning} if self.reasoning else {}
        return {"role": "assistant", "content": self.text, **reasoning}

    def summary(self, *, stopped: bool) -> str:
        """The length and speed of the answer."""
        n = self.n_tokens if not self.end or self.end.n_tokens is None else self.end.n_tokens
        parts = [f"{n:,} token{'s' if n != 1 else ''}"]
        if self._first is not None:
            if n > 1 and self._last > self._first:
                parts.append(f"{(n - 1) / (self._last - self._first):,.1f} tokens/s")
            parts.append(f"first token after {self._first - self._began:.2f} s")
        return " · ".join([*parts, "stopped"] if stopped else parts)


def write_messages(path: Path, messages: list[Json]) -> None:
    """Writes a conversation: as Markdown if the name ends in .md, otherwise as JSON. Raises `CppBatchError`."""
    is_markdown = path.suffix.lower() in (".md", ".markdown")
    text = _markdown(messages) if is_markdown else json.dumps(messages, ensure_ascii=False, indent=2) + "\n"
    if is_model(path):
        raise CppBatchError(f"{path} is a model file, which is never overwritten: give another name")
    try:
        if is_stream(path):
            path.write_text(text, encoding="utf-8")
        else:
            part = Path(os.path.realpath(path)).with_name(f"{path.name}.part")
            part.write_text(text, encoding="utf-8")
            replace_file(part, path)
    except OSError as error:
        raise CppBatchError(f"{path} cannot be written: {error.strerror}") from error


def _markdown(messages: list[Json]) -> str:
    titles = {"system": "System", "user": "User", "assistant": "Assistant"}
    return "\n".join(f"## {titles.get(each['role'], each['role'])}\n\n{_format_message(each)}\n" for each in messages)


def _format_message(message: Json) -> str:
    """The text of a message. Images and audio are only named."""
    content = message.get("content")
    if not isinstance(content, list):
        return str(content)
    names = {"image_url": "*(image)*", "input_audio": "*(audio)*"}
    return "\n\n".join(part.get("text") or names.get(part["type"], f"*({part['type']})*") for part in content)


def read_messages(path: Path) -> list[Json]:
    """Reads a conversation: a JSON list of OpenAI's messages, or an object with that list in `messages`. Raises
    `ConfigError`."""
    try:
        content = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(
            f"{path} is not valid JSON ({error}); give a file written by --save or /save FILE.json"
        ) from error
    messages: Any = content.get("messages") if isinstance(content, dict) else content
    try:
        conversation_of(convert(messages, list[ChatMessage], "messages"))
    except CppBatchError as error:
        raise ConfigError(f"{path} is not a saved conversation: {error}") from error
    return list(messages)
