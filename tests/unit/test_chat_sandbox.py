"""The sandbox that chat templates run in, and where `--chat-template` finds one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from cppbatch.chat.metered_sandbox import compile_metered, render_metered
from cppbatch.chat.sandbox import Sandbox, make_sandbox, render_template
from cppbatch.chat.template import find_template
from cppbatch.cli.server_options import server_options
from cppbatch.errors import ConfigError, InvalidRequest
from cppbatch.server.settings import ServerSettings
from tests.support.conversations import SUM, template_of


def test_the_templates_own_error_is_reported() -> None:
    with pytest.raises(InvalidRequest, match="roles must alternate") as refused:
        template_of("{{ raise_exception('roles must alternate') }}").render([SUM])
    assert refused.value.field == "messages"


def test_a_long_error_of_a_template_is_shortened() -> None:
    with pytest.raises(InvalidRequest) as refused:
        template_of("{{ raise_exception('no ' * 1000000) }}").render([SUM])
    assert len(str(refused.value)) < 1100


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ namespace(_x=1) }}",
        "{% set ns = namespace() %}{% set ns._x = 1 %}",
        "{{ dict.__subclasses__() }}",
        "{% for i in range(1000000) %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ 1 / 0 }}",
        "{{ nothing.at.all }}",
        "{{ 'a' | tojson(nonsense=1) }}",
    ],
)
def test_a_template_that_violates_the_sandbox_is_an_error_of_the_request(source: str) -> None:
    with pytest.raises(InvalidRequest, match="do not fit this model's chat template"):
        template_of(source).render([SUM])


# Rendered by both sandboxes.
SAME = {
    "{% for x in 'abc' if x != 'b' %}{{ x }}{{ loop.index }}/{{ loop.length }}{{ loop.nextitem }} {% endfor %}": (
        "a1/2c c2/2 "
    ),
    "{{ '-' * 3 }}{{ 2 * 3.5 }} {{ 2 ** 10 }} {{ 7 % 4 }} {{ 7 // 2 - -1 }}": "---7.0 1024 3 4",
    "{{ 'a' + 'b' + 'c' }}{{ 1 + 2 + 3 }}{{ [1] + [2] }}{{ {}.x + 'd' }}": "abc6[1, 2]d",
    "{{ 'a' ~ 1 ~ none ~ [2] }}": "a1None[2]",
    "{{ 'abcdef'[1:4] }}{{ 'abc'[::-1] }}{{ [1, 2, 3][:-1] }}": "bcdcba[1, 2]",
    "{{ 'b' in 'abc' }}{{ 'x' not in ['a', y] }}{{ y in [y] }}{{ 'k' in {'k': 1} }}": "TrueTrueTrueTrue",
    "{{ [1, 2] == [1, 2] }}{{ y < 'z' }}{{ y != y }}{{ 1 >= 1 }}": "TrueTrueFalseTrue",
    "{{ y.upper() }}{{ ' a '.strip() }}{{ 'a-b'.split('-') }}{{ 'aa'.replace('a', 'b') }}": "Ya['a', 'b']bb",
    "{{ 'a b'.title() }}{{ '-'.join(['a', 'b']) }}{{ 'a {} {b}'.format(1, b=2) }}{{ {'a': 1}.get('a') }}": (
        "A Ba-ba 1 21"
    ),
    "{{ [3, 1, 2] | sort }}{{ [1, 1] | unique | list }}{{ [2, 1] | min }}{{ {'b': 1, 'a': 2} | dictsort }}": (
        "[1, 2, 3][1]1[('a', 2), ('b', 1)]"
    ),
    "{{ [{'a': 1}] | map(attribute='a') | list }}{{ none | selectattr('a', 'equalto', 1) | list }}": "[1][]",
    "{{ 'a\nb' | indent(2) }}{{ '7' | int + 1 }}{{ missing | default('d') }}{{ ' x ' | trim }}": "a\n  b8dx",
    "{% macro f(a) %}<{{ a }}>{% endmacro %}{{ f(1) }}{% set b %}c{{ f(2) }}{% endset %}{{ b | upper }}": "<1>C<2>",
    "{{ ['b', 'A'] | sort(reverse=true, case_sensitive=true) }}{{ {'b': 1, 'a': 2} | dictsort(by='value') }}": (
        "['b', 'A'][('b', 1), ('a', 2)]"
    ),
    "{{ 'ff' | int(0, 16) }}{{ 'a\nb'.splitlines(true) }}{{ 'u' in [{'a': 'u'}] | map(attribute='a') }}": (
        "255['a\\n', 'b']True"
    ),
    "{% set ns = namespace(a=[]) %}{{ ns.a.append(1) }}{% set ns.a = ns.a + [2] %}{{ ns.a }}{{ ns.a.pop() }}": (
        "None[1, 2]2"
    ),
}


@pytest.mark.parametrize("source", SAME)
def test_a_template_renders_the_same_in_this_process_and_in_a_child(source: str) -> None:
    variables = {"y": "y"}
    assert render_metered(compile_metered(source), variables) == SAME[source]
    assert render_template(make_sandbox(Sandbox).from_string(source), variables) == SAME[source]


def test_templates_find_what_transformers_gives_them() -> None:
    source = (
        "{% generation %}{% set x = 1 %}{{ x }}{% endgeneration %}{{ x is defined }} "
        "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %} "
        "{{ {'b': '<ö>', 'a': 1} | tojson(sort_keys=true, separators=(',', ':')) }} {{ [1] | tojson(indent=1) }} "
        "{{ dict(a=1).a }}{{ dict.fromkeys('a') }} {{ namespace(a=1).a }} {{ strftime_now('%Y') | length }}"
    )
    from transformers.utils.chat_template_utils import render_jinja_template  # slow to import

    expected = render_jinja_template([[SUM]], chat_template=source)[0][0]
    assert template_of(source).render([SUM], add_generation_prompt=False) == expected
    assert expected == '1False 01 {"a":1,"b":"<ö>"} [\n 1\n] 1{\'a\': None} 1 4'


@pytest.mark.parametrize("source", ["{% if %}", "{{ a", "{% nonsense %}", "{{ a | nonsense }}", "{% for %}"])
def test_a_broken_template_is_reported_as_broken(source: str) -> None:
    with pytest.raises(InvalidRequest, match="template failed"):
        template_of(source)
    with pytest.raises(ConfigError, match="template failed"):
        find_template(source + "{{ 1 }}")


def test_a_template_is_found_by_name_by_text_or_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{{ 'ö' }}", "utf-8")
    assert find_template(str(file)) == "{{ 'ö' }}"
    assert find_template("{% if a %}b{% endif %}") == "{% if a %}b{% endif %}"
    assert find_template("chatml") != "chatml"


def test_words_are_a_template_with_a_warning_as_in_llama_server(caplog: pytest.LogCaptureFixture) -> None:
    words = "This is not a chat template, it is"
    assert find_template(words) == words
    assert caplog.messages == [f"--chat-template contains no {{{{ }}}}, so every chat prompt is {words!r}"]
    assert template_of(words).render([{"role": "user", "content": "Hi"}]) == words


@pytest.mark.parametrize("value", ["nosuch", "x" * 5000, "a\0b", ".", ""])
def test_an_invalid_template_name_is_refused_with_the_valid_names(value: str) -> None:
    with pytest.raises(ConfigError, match=r"chatml, gemma, .*zephyr"):
        find_template(value)


@pytest.mark.parametrize("value", ["my template.jinja", "a folder/template"])
def test_a_missing_template_file_is_refused_with_the_reason(value: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"the file {value!r} cannot be read (No such file or directory)")):
        find_template(value)


def test_a_file_that_holds_no_template_is_refused(tmp_path: Path) -> None:
    binary, empty = tmp_path / "binary", tmp_path / "empty"
    binary.write_bytes(b"\xff\xfe")
    empty.write_text(" \n")
    with pytest.raises(ConfigError, match="utf-8"):
        find_template(str(binary))
    with pytest.raises(ConfigError, match="empty"):
        find_template(str(empty))


def test_the_option_is_read_before_a_model_is_looked_for(tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{{ 'mine' }}")

    @click.command()
    @server_options
    def show(settings: ServerSettings, **_others: Any) -> None:
        click.echo(settings.chat_template)

    runner = CliRunner()
    assert runner.invoke(show, ["--chat-template", str(file)]).output == "{{ 'mine' }}\n"
    assert runner.invoke(show, env={"CPPBATCH_CHAT_TEMPLATE": "chatml"}).output == find_template("chatml") + "\n"
    assert runner.invoke(show).output == "\n"
    assert isinstance(runner.invoke(show, ["--chat-template", "nosuch"]).exception, ConfigError)
