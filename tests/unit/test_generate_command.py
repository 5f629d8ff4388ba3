"""What `cppbatch generate` prints while it runs, and after Ctrl-C."""

from __future__ import annotations

import msgspec
import pytest

from cppbatch import FinishReason, GenerationEvent
from cppbatch.cli.generate_command import _JsonPrinter, _TextPrinter
from cppbatch.engine.request import RequestUsage

USAGE = RequestUsage(
    prompt_tokens=1, completion_tokens=1, queue_seconds=0.0, first_token_seconds=0.0, total_seconds=0.0
)


def event(text: str, *, last: bool = False) -> GenerationEvent:
    end = {"finish_reason": FinishReason.STOP, "usage": USAGE, "seed": 7} if last else {}
    return msgspec.structs.replace(GenerationEvent(request_id="", text=text, tokens=[5]), **end)


def test_a_text_is_printed_while_it_is_generated_and_the_next_one_after_it(capsys: pytest.CaptureFixture[str]) -> None:
    printer = _TextPrinter(["one", "two"])
    steps = [
        (0, event("a"), "--- 1: one\na"),
        (1, event("x"), ""),
        (0, event("b"), "b"),
        (1, event("y", last=True), ""),
    ]
    for index, new, printed in steps:
        printer.add(index, new)
        assert capsys.readouterr().out == printed
    printer.add(0, event("c", last=True))
    assert capsys.readouterr().out == "c\n\n--- 2: two\nxy\n"


def test_after_ctrl_c_every_text_so_far_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    printer = _TextPrinter(["one", "two", "three"])
    printer.add(0, event("a"))
    printer.add(2, event("x", last=True))
    printer.interrupt()
    assert capsys.readouterr().out == "--- 1: one\na\n\n--- 3: three\nx\n"


def test_json_lines_come_in_the_order_of_the_prompts_and_after_ctrl_c_with_the_partial_texts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    printer = _JsonPrinter(["one", "two", "three"])
    printer.add(1, event("x", last=True))
    printer.add(2, event("y"))
    assert capsys.readouterr().out == ""
    printer.add(0, event("a", last=True))
    printer.interrupt()
    lines = [msgspec.json.decode(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["index"], line["prompt"], line["text"], line["finish_reason"]) for line in lines] == [
        (0, "one", "a", "stop"), (1, "two", "x", "stop"), (2, "three", "y", "cancelled"),
    ]  # fmt: skip
