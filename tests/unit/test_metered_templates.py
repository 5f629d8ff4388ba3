"""Templates that render in this process cost little, and those that may cost more are left to a child process."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import jinja2
import pytest

from cppbatch.chat.metered_sandbox import compile_metered, render_metered
from cppbatch.chat.render_budget import NotQuick
from tests.support.hostile_templates import HOSTILE, LONG

MESSAGES: dict[str, Any] = {"messages": [{"role": "user", "content": "X"}]}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_template_that_takes_long_is_left_to_a_child_process_after_a_moment(name: str) -> None:
    began = time.thread_time()
    with pytest.raises(NotQuick) as refused:
        render_metered(compile_metered(HOSTILE[name]), MESSAGES)
    assert time.thread_time() - began < 1
    assert not refused.value.is_large


@pytest.mark.parametrize("name", LONG)
def test_a_long_template_is_not_compiled_in_this_process(name: str) -> None:
    with pytest.raises(NotQuick):
        compile_metered(LONG[name])


@pytest.mark.parametrize("unit", ["{%macro f()%}{%endmacro%}", "{{a}}x"])
def test_the_longest_template_that_is_compiled_in_this_process_takes_a_moment(unit: str) -> None:
    began = time.thread_time()
    with contextlib.suppress(NotQuick):
        compile_metered(unit * (32_000 // len(unit)))
    assert time.thread_time() - began < 2


def test_the_budget_grows_with_the_conversation() -> None:
    template = compile_metered("{% for m in messages %}{{ '<' + m.role + '>' + m.content | trim }}{% endfor %}")
    messages = [{"role": "user", "content": "How much is it?"}] * 3000
    assert len(render_metered(template, {"messages": messages})) == 3000 * len("<user>How much is it?")


def test_only_the_conversation_is_to_blame_when_it_is_large() -> None:
    template = compile_metered("{% for m in messages %}{{ m.content | upper | lower | upper | lower }}{% endfor %}")
    with pytest.raises(NotQuick) as refused:
        render_metered(template, {"messages": [{"role": "user", "content": "x" * 1_000_000}] * 20})
    assert refused.value.is_large


def test_a_template_that_takes_long_for_some_conversations_is_quick_for_others() -> None:
    assert render_metered(compile_metered(HOSTILE["later"]), {"messages": [{"content": "Y"}]}) == "ok"


def test_errors_of_a_template_are_its_own() -> None:
    with pytest.raises(jinja2.TemplateError, match="no system role"):
        render_metered(compile_metered("{{ raise_exception('no system role') }}"), {})
    with pytest.raises(TypeError):
        render_metered(compile_metered("{{ none + 1 }}"), {})
