"""Chat templates that are not known to be quick render in a child process within limits, and are refused afterwards."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import jinja2
import psutil
import pytest

from cppbatch.chat import template_program
from cppbatch.chat.chat_format import ChatFormat
from cppbatch.chat.sandbox import HostFunction
from cppbatch.chat.template import ChatTemplate, find_template
from cppbatch.chat.template_program import Limits, NeedsChild, TemplateProgram, TemplateStopped, program_of, quick_only
from cppbatch.errors import ConfigError, InvalidRequest
from tests.support.conversations import HELLO, SUM, template_of
from tests.support.hostile_templates import HOSTILE, LONG

QUICK = Limits(compiling=2, rendering=0.3, slow=10, pause=60)
OUTSIDE = "{{ '' | center(3) }}"
"""An operation that is not known to be cheap."""


@pytest.fixture(autouse=True)
def no_child_stays(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    made: list[Any] = []
    start = template_program._Child._start

    def remember(child: Any, **named: Any) -> Any:
        made.append(child)
        return start(child, **named)

    monkeypatch.setattr(template_program._Child, "_start", remember)
    yield
    for child in made:
        child._end()


def children() -> list[psutil.Process]:
    """The processes that render templates."""
    return [each for each in psutil.Process().children() if "cppbatch.chat.template_child" in each.cmdline()]


def test_the_child_answers_for_every_kind_of_result() -> None:
    program = TemplateProgram(
        "{% if x == 1 %}{{ raise_exception('no ü') }}{% elif x == 2 %}{{ none + 1 }}{% elif x == 3 %}"
        "{{ llama_cpp_template('chatml', messages, true) }}{% elif x == 4 %}{{ messages.append(1) }}"
        "{% else %}{{ x }}{{ messages | tojson }}{% endif %}" + OUTSIDE,
        Limits(rendering=20, slow=20),
    )
    program.check()
    assert not program.is_quick
    assert program.render({"x": "ö\ud800", "messages": [1]}) == "ö\ud800[1]   "
    with pytest.raises(jinja2.TemplateError, match="no ü"):
        program.render({"x": 1})
    with pytest.raises(TypeError):
        program.render({"x": 2})
    given: list[Any] = []

    def apply(*args: Any) -> str:
        given.append(args)
        return "rendered"

    call = HostFunction(apply)
    assert program.render({"x": 3, "messages": [{"role": "user"}], "llama_cpp_template": call}) == "rendered   "
    assert given == [("chatml", [{"role": "user"}], True)]

    def fails(*_args: Any) -> None:
        raise InvalidRequest("messages[0]", "contains a null character")

    with pytest.raises(jinja2.TemplateError, match="contains a null character"):
        program.render({"x": 3, "messages": [], "llama_cpp_template": HostFunction(fails)})
    with pytest.raises(jinja2.exceptions.TemplateError):  # the request's own list
        program.render({"x": 4, "messages": [1]})
    assert len(children()) == 1


def test_a_template_that_loops_is_stopped_and_then_refused_at_once() -> None:
    program = TemplateProgram(HOSTILE["later"], QUICK)
    calm, loops = {"messages": [{"content": "Y"}]}, {"messages": [{"content": "X"}]}
    assert program.render(calm) == "ok"
    assert program.is_quick
    with pytest.raises(TemplateStopped, match=r"takes longer than 0\.3 s; it is tried again in 60 s"):
        program.render(loops)
    assert not program.is_quick
    assert children() == []
    began = time.monotonic()
    for _ in range(100):
        with pytest.raises(TemplateStopped, match="it is tried again"):
            program.render(calm)
    assert time.monotonic() - began < 1
    assert children() == []


def test_a_stopped_template_is_tried_again_after_a_pause_that_doubles() -> None:
    program = TemplateProgram(HOSTILE["later"], QUICK._replace(pause=0.2))
    for pause in (0.2, 0.4):
        with pytest.raises(TemplateStopped, match=r"takes longer than 0\.3 s"):
            program.render({"messages": [{"content": "X"}]})
        time.sleep(pause)
    assert program.render({"messages": [{"content": "Y"}]}) == "ok"


def test_a_template_that_needs_much_memory_is_stopped() -> None:
    program = TemplateProgram("{{ ('x' * 30000000) | center(10 ** 10) }}", QUICK._replace(rendering=10))
    with pytest.raises(TemplateStopped, match="memory"):
        program.render({})


def test_a_child_that_dies_is_replaced() -> None:
    program = TemplateProgram(OUTSIDE, QUICK._replace(rendering=10, pause=0))
    assert program.render({}) == "   "
    (child,) = children()
    child.kill()
    child.wait()
    assert program.render({}) == "   "


def test_a_child_ends_when_it_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_program, "_IDLE_S", 0.1)
    program = TemplateProgram(OUTSIDE, QUICK._replace(rendering=10))
    program.render({})
    end = time.monotonic() + 10
    while children() and time.monotonic() < end:
        time.sleep(0.02)
    assert children() == []


@pytest.mark.parametrize("name", ["macros", "outputs"])
def test_compiling_is_stopped(name: str) -> None:
    program = TemplateProgram(LONG[name], QUICK._replace(compiling=0.2))
    for _ in range(3):
        with pytest.raises(TemplateStopped, match=r"takes longer than 0\.2 s"):
            program.check()
    assert children() == []


def test_a_template_that_is_too_long_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="16,000,000 characters; the limit is 1,000,000"):
        TemplateProgram(LONG["large"]).check()


@pytest.mark.parametrize("source", ["{% if %}", "{{ a | nonsense }}", OUTSIDE + "{{ a | nonsense }}"])
def test_a_broken_template_is_compiled_once(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidRequest, match="the chat template failed"):
        template_of(source)
    monkeypatch.setattr(TemplateProgram, "__init__", lambda *_: pytest.fail("compiled again"))
    monkeypatch.setattr(template_program._Child, "compile", lambda *_: pytest.fail("compiled again"))
    with pytest.raises(InvalidRequest, match="the chat template failed"):
        template_of(source)
    with pytest.raises(ConfigError, match="the chat template failed"):
        find_template(source)


def test_a_thread_that_must_not_wait_does_not_wait() -> None:
    program = TemplateProgram(OUTSIDE, QUICK)
    with quick_only(), pytest.raises(NeedsChild):
        program.render({})
    assert children() == []


def test_renderings_wait_for_each_other_and_are_refused_when_one_was_stopped() -> None:
    program = TemplateProgram(HOSTILE["loops"], QUICK)
    errors: list[str] = []

    def render() -> None:
        try:
            program.render({})
        except TemplateStopped as error:
            errors.append(error.message)

    began = time.monotonic()
    threads = [threading.Thread(target=render) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 20
    assert time.monotonic() - began < 5


def test_a_template_that_takes_long_for_every_message_is_refused_while_it_is_learned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cppbatch.chat.template._LEARNING_SECONDS", 0.2)
    program_of.cache_clear()
    template = ChatTemplate("{% for i in range(99999) %}{{ lipsum() }}{% endfor %}", bos="", eos="")
    began = time.monotonic()
    with pytest.raises(TemplateStopped, match="it is tried again in 10 s"):
        ChatFormat(template)
    with pytest.raises(TemplateStopped):
        template.render([SUM])
    assert time.monotonic() - began < 4


def test_a_template_outside_the_subset_is_learned_in_the_child() -> None:
    chatml = find_template("chatml")
    template, usual = template_of(chatml + "{{ '' | center(0) }}"), template_of(chatml)
    assert not template.is_quick
    assert template.capabilities == usual.capabilities
    assert template.form == usual.form
    assert template.render([HELLO, SUM]) == usual.render([HELLO, SUM])
