"""A chat format with messages from the test, and servers that use it: tool calls without a capable model."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pydantic
import pytest
from aiohttp import web

from cppbatch import LocalEngine
from cppbatch.chat.chat_format import ChatForms, ChatTurn, PreparedChat
from cppbatch.chat.output_parser import ArgumentsDelta, Delta, ReasoningDelta, TextDelta, ToolCallStart
from cppbatch.chat.template import ChatTemplate
from cppbatch.errors import LlamaError, client_name
from cppbatch.llama import Batch
from cppbatch.server.app import create_app
from cppbatch.server.models.served import MODELS, OneModel
from cppbatch.server.settings import ServerSettings
from tests.support.app_thread import AppThread

Json = dict[str, Any]

ENDS = {"guided_regex": "[a-z]{12}"}
"""Params with which a tiny model ends its text."""
SCRIPT: list[Delta] = [
    ReasoningDelta("Let me "),
    ReasoningDelta("think."),
    TextDelta("I shall "),
    TextDelta("look."),
    ToolCallStart(0, "call_a", "weather"),
    ArgumentsDelta(0, '{"city": '),
    ArgumentsDelta(0, '"Paris"}'),
    ToolCallStart(1, "call_b", "time"),
    ArgumentsDelta(1, "{}"),
]
"""Thoughts, text and two calls."""


class ScriptedReader:
    """Gives a piece for each bit of text, and at its end the rest."""

    def __init__(self, script: list[Delta]) -> None:
        self._left = list(script)

    def push(self, _text: str) -> list[Delta]:
        return [self._left.pop(0)] if self._left else []

    def close(self) -> list[Delta]:
        return self._left


class ScriptedFormat:
    """Records its requests, and returns the script regardless of the model's output."""

    def __init__(self, script: list[Delta], **params: Any) -> None:
        self._script, self._params = script, params
        self.template = ChatTemplate(None, bos="", eos="")
        self.token_ids: Json = {}
        self.forms = ChatForms(tool_calls="NAME()", tools_described_by="template", thoughts=None)
        self.asked: Json = {}

    def render(self, turn: ChatTurn) -> PreparedChat:
        self.asked = msgspec.structs.asdict(turn)
        return PreparedChat(
            prompt=str(turn.messages),
            output_parser=lambda: ScriptedReader(self._script),
            params=self._params,
            field_names={"prompt": client_name("messages", turn.field_names)},
        )


class ChatServer(AppThread):
    """A server of a tiny model."""

    def __init__(self, model: Path, settings: ServerSettings | None = None, **engine: Any) -> None:
        def make_app(client: LocalEngine) -> web.Application:
            self.app = create_app(client, settings)
            return self.app

        super().__init__({"model": model, "n_parallel": 4, "n_threads": 1, "n_ctx": 1024, **engine}, make_app)

    @property
    def serving(self) -> Any:
        """The engine and settings that answer."""
        models = self.app[MODELS]
        assert isinstance(models, OneModel)
        return models.serving

    def use(self, form: ScriptedFormat | None) -> None:
        """From now on the model holds conversations like this; None: as it does itself."""
        serving = self.serving
        made = serving.client.chat_formats.made
        made.pop(serving._own_template, None)
        if form:
            made[serving._own_template] = form

    def fail_in_midstream(self, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
        """Lets the next request's decodes fail: after a few steps, and when the event is set."""
        assert self.engine._engine
        context, steps, go_on = self.engine._engine.runtime.context, itertools.count(), threading.Event()
        decode = context.decode

        def fail_later(batch: Batch) -> None:
            if next(steps) > 3:
                assert go_on.wait(30)
                raise LlamaError("the device is on fire")
            decode(batch)

        monkeypatch.setattr(context, "decode", fail_later)
        return go_on

    def events(self, path: str, body: Json) -> list[tuple[str, Json]]:
        """The server-sent events of a request: names and data."""
        with self.stream(path, {**body, "stream": True}) as answer:
            return list(_parsed(answer.read().decode()))


def _parsed(text: str) -> Iterator[tuple[str, Json]]:
    *events, rest = text.split("\n\n")
    assert rest == ""
    for event in events:
        name, data = event.split("\n")
        yield name.removeprefix("event: "), json.loads(data.removeprefix("data: "))


def strictly(kind: Any, data: object, *more: str) -> Any:
    """The data as a client's type, which declares each of its fields, except for those named in `more`."""
    value = pydantic.TypeAdapter(kind).validate_python(data, strict=True)
    assert not (unknown := _unknown(value) - set(more)), f"{unknown} in {data}"
    return value


def _unknown(value: object) -> set[str]:
    if isinstance(value, (list, tuple)):
        return set().union(*map(_unknown, value))
    if not isinstance(value, pydantic.BaseModel):
        return set()
    inner = [_unknown(each) for each in vars(value).values()]
    return set(value.model_extra or {}).union(*inner)
