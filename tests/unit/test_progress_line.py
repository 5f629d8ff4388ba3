"""The progress line of Python calls: on a terminal, for several prompts, one at a time."""

from __future__ import annotations

import io
import sys
from typing import Any

import pytest

from tests.support.fakes import fake_engine, greedy

PROMPTS = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
PARAMS = greedy(3, ignore_eos=True)


class Stream(io.StringIO):
    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__()
        self.isatty = lambda: is_terminal  # type: ignore[method-assign]


class Show:
    """Replaces stderr, during the test itself: pytest replaces it between a fixture and its test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TERM", "xterm")
        self._monkeypatch = monkeypatch

    def stderr_of(self, call: Any, *, is_terminal: bool = True, **arguments: Any) -> str:
        """What a call writes there."""
        stream = Stream(is_terminal=is_terminal)
        with self._monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", stream)
            call(**arguments)
        return stream.getvalue()


@pytest.fixture
def show(monkeypatch: pytest.MonkeyPatch) -> Show:
    return Show(monkeypatch)


def generate(**arguments: Any) -> None:
    fake_engine(n_ctx=256).generate(PROMPTS, PARAMS, **arguments)


def map_all(**arguments: Any) -> None:
    assert len(list(fake_engine(n_ctx=256).map(PROMPTS, PARAMS, **arguments))) == len(PROMPTS)


@pytest.mark.parametrize("call", [generate, map_all])
def test_a_terminal_shows_the_finished_prompts_and_their_tokens(call: Any, show: Show) -> None:
    shown = show.stderr_of(call)
    assert [text for text in ("generating", "3/3", "9 tokens") if text not in shown] == []


@pytest.mark.parametrize("call", [generate, map_all])
def test_a_file_or_a_pipe_gets_no_line_unless_asked_for(call: Any, show: Show) -> None:
    assert show.stderr_of(call, is_terminal=False) == ""
    assert "3/3" in show.stderr_of(call, is_terminal=False, progress=True)


@pytest.mark.parametrize("call", [generate, map_all])
def test_false_turns_the_line_off(call: Any, show: Show) -> None:
    assert show.stderr_of(call, progress=False) == ""


def test_a_single_prompt_has_no_line(show: Show) -> None:
    assert show.stderr_of(lambda: fake_engine().generate(PROMPTS[:1], PARAMS)) == ""


def test_a_caller_that_shows_the_events_gets_no_line_between_them(show: Show) -> None:
    assert show.stderr_of(generate, on_event=lambda _index, _event: None) == ""


def test_a_call_within_another_one_has_no_line_of_its_own(show: Show) -> None:
    engine = fake_engine(n_ctx=256)

    def call_within() -> None:
        for _ in engine.map(PROMPTS * 2, PARAMS):
            engine.generate(PROMPTS, PARAMS)

    shown = show.stderr_of(call_within)
    assert "6/6" in shown
    assert "3/3" not in shown
    assert "3/3" in show.stderr_of(generate), "the line of the earlier call has ended"


def test_a_closed_stderr_is_not_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    generate()
