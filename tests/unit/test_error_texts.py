"""A message never quotes a whole text of a file or a request: one rule for all errors."""

from __future__ import annotations

from typing import Any

import pytest

from cppbatch import errors
from cppbatch.errors import (
    CppBatchError,
    Forbidden,
    InvalidRequest,
    ModelLoadFailed,
    NotFound,
    NotJsonLines,
    QueueFull,
    client_name,
    client_names,
    shorten,
)

LONG = "quoted " * 200_000
KINDS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, CppBatchError) and kind not in (QueueFull, errors.DecodeFailed)
]


def test_a_short_text_is_as_it_was() -> None:
    for text in ("", "short", "x" * 2000):
        assert shorten(text) == text


def test_of_a_long_text_its_start_and_its_end_remain() -> None:
    text = f"start {LONG} the remedy"
    short = shorten(text)
    assert (len(short), short[:6], short[-10:]) == (2000, "start ", "the remedy")
    assert "more characters left out" in short


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_error_is_shortened(kind: type[CppBatchError]) -> None:
    arguments: list[Any] = [f"is {LONG}; it must be short"]
    if issubclass(kind, InvalidRequest):
        arguments.insert(0, "field")
    if kind is NotJsonLines:
        arguments.insert(0, "input.json")
    if kind is ModelLoadFailed:
        arguments.append(1.0)
    error = kind(*arguments)
    assert len(str(error)) <= 2000
    assert str(error).endswith("it must be short")


def test_the_field_of_an_error_is_shortened_too() -> None:
    error = NotFound(f"tools.{LONG}", "is unknown").with_field(f"messages.{LONG}")
    assert (len(error.field), error.message) == (200, "is unknown")
    assert str(error) == f"{error.field}: is unknown"


NAMES = {
    "prompt": "input",
    "n": "n_cmpl",
    "logprobs": "top_logprobs",
    "temperature": "options.temperature",
    "tools[1]": "tools[3].tools[0]",
    "tools[10]": "tools[4]",
    "function.": "",
    "function.parameters": "input_schema",
}


@pytest.mark.parametrize(
    ("field", "client"),
    {
        "prompt": "input",
        "prompt[2][0]": "input[2][0]",
        "n": "n_cmpl",
        "n_keep": "n_keep",
        "top_logprobs": "top_logprobs",
        "temperature": "options.temperature",
        "tools[1].function.name": "tools[3].tools[0].name",
        "tools[10].function.parameters.type": "tools[4].input_schema.type",
        "tools[100].function": "tools[100].function",
        "tools[10].function.parameters.properties.prompt": "tools[4].input_schema.properties.prompt",
        "seed": "seed",
    }.items(),
)
def test_an_error_has_the_clients_name_of_a_field(field: str, client: str) -> None:
    assert client_name(field, NAMES) == client
    with pytest.raises(InvalidRequest, match="is wrong") as raised, client_names(NAMES):
        raise InvalidRequest(field, "is wrong")
    assert raised.value.field == client


def test_an_error_whose_field_the_client_has_named_remains_of_its_kind() -> None:
    with pytest.raises(Forbidden), client_names(NAMES):
        raise Forbidden("lora", "is not allowed")
