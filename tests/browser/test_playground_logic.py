"""The playground's modules without DOM: templates, tables, values, differences, the order of cells."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Page

from cppbatch.errors import ConfigError
from cppbatch.jobs.input.format import PromptTemplate

Call = Callable[..., Any]


@pytest.fixture
def call(modules: Page) -> Call:
    """Calls a function of a module; an exception becomes its message."""

    def call(module: str, expression: str, *arguments: Any) -> Any:
        script = f"""async (a) => {{
          const m = await import('/page/playground/{module}.js')
          try {{ return {expression} }} catch (error) {{ return `ERROR ${{error.message}}` }}
        }}"""
        return modules.evaluate(script, list(arguments))

    return call


# --- templates and tables ---------------------------------------------------------------------------------------------

ROW = {"x": "X", "a b": "AB", "y": "{x}"}


@pytest.mark.parametrize(
    "source",
    ["{x}", "a {x} {{y}} {a b}{x}", "{y}", "{{{x}}}", "{", "}", "{}", "{x", "x}", "{x:3}", "{x!r}", "{{x}", "{x}}"],
)
def test_a_template_means_what_it_means_in_a_batch_job(call: Call, source: str) -> None:
    render = "new m.PromptTemplate(a[0]).render(a[1])"
    found = call("prompt_template", render, source, ROW)
    try:
        assert found == PromptTemplate(source).render(ROW)
    except ConfigError:
        assert found.startswith("ERROR Unmatched ")


TABLES = {
    "commas": ("a,b\n1,2\n3,4\n", ["1|2", "3|4"]),
    "tabs, as a spreadsheet copies them": ("a\tb\r\n1\t2, 3\r\n", ["1|2, 3"]),
    "semicolons": ("a;b\n1;2\n", ["1|2"]),
    "quotes, separators and lines in a field": ('a,b\n"1,""2""\n3",4', ['1,"2"\n3|4']),
    "blank lines": ("\ufeffa,b\n\n1,2\n \n3,4", ["1|2", "3|4"]),
    "empty fields": ("a,b\n,\n1,2,,", ["|", "1|2"]),
    "one column": ("a\nx\ny z", ["x", "y z"]),
}


@pytest.mark.parametrize(("source", "rows"), TABLES.values(), ids=TABLES)
def test_a_table_is_read_as_spreadsheets_and_csv_write_it(call: Call, source: str, rows: list[str]) -> None:
    assert call("run_plan", "m.parseTable(a[0]).rows.map((row) => Object.values(row).join('|'))", source) == rows


BAD_TABLES = {
    "too few fields": ("a,b\n1,2\n3", "Line 3 has 1 fields, but the first line names 2"),
    "too many fields": ("a,b\n1,2,3", "Line 2 has 3 fields, but the first line names 2: quote values"),
    "an open quote": ('a\n"1\n2', "Line 2 has a quote that is not closed"),
    "text behind a quote": ('a\n"1" 2', "Line 2 has text after a closing quote"),
}


@pytest.mark.parametrize(("source", "message"), BAD_TABLES.values(), ids=BAD_TABLES)
def test_a_table_that_cannot_be_read_names_the_line(call: Call, source: str, message: str) -> None:
    assert call("run_plan", "m.parseTable(a[0])", source).startswith(f"ERROR {message}")


# --- what varies ------------------------------------------------------------------------------------------------------

VALUES: dict[str, Any] = {
    "0, 0.7,1": [0, 0.7, 1],
    "1..4": [1, 2, 3, 4],
    "0..1.5 x 4": [0, 0.5, 1, 1.5],
    "0..0.3x4": [0, 0.1, 0.2, 0.3],
    "-1..1 x 3": [-1, 0, 1],
    "1..0 x 3, 5": [1, 0.5, 0, 5],
    " ": [],
    "hot": "ERROR hot is not a number",
    "0..1.5": "ERROR Give the number of values",
    "1, 0..1": "ERROR 1 occurs twice",
    "4..1": "ERROR 4..1 has -2 values",
    "0..1 x 1.5": "ERROR 0..1 x 1.5 has 1.5 values",
    "1..99": "ERROR 1..99 has 99 values",
}


@pytest.mark.parametrize("source", VALUES)
def test_values_are_a_list_or_a_range(call: Call, source: str) -> None:
    found: Any = call("vary", "m.parseValues(a[0])", source)
    expected = VALUES[source]
    assert found[: len(expected)] == expected
    assert isinstance(found, str) or len(found) == len(expected)


def plan(call: Call, **form: Any) -> Any:
    return call("run_plan", "m.planRun({...m.EMPTY_FORM, ...a[0]})", {"prompt": "Hi", **form})


def test_prompts_settings_and_samples_are_multiplied_and_labelled(call: Call) -> None:
    planned = plan(
        call,
        prompt="{n}{{!}}",
        system="Be {n}.",
        table="n\nA\nB",
        vary=[{"name": "temperature", "values": "0, 1"}, {"name": "top_k", "values": " "}],
        samples="2",
        settings={"seed": 5, "temperature": 9, "max_tokens": 3},
    )
    chats = [
        {"messages": [{"role": "system", "content": f"Be {n}."}, {"role": "user", "content": f"{n}{{!}}"}]}
        for n in "AB"
    ]
    assert planned["body"] == {
        "prompts": chats,
        "max_tokens": 3,
        "params": [{"temperature": t, "seed": seed} for t in (0, 1) for seed in (5, 6)],
    }
    assert planned["labels"] == [f"{n} · temperature {t}, sample {i}" for n in "AB" for t in (0, 1) for i in (1, 2)]
    assert plan(call, kind="text", system="x", vary=[])["body"]["prompts"] == ["Hi"]


BAD_FORMS: dict[str, dict[str, Any]] = {
    "Enter a prompt": {"prompt": " "},
    "{m} is not a column of the table; available: n, o": {"prompt": "{m}", "table": "n,o\n1,2"},
    "Insert a column, such as {n}": {"table": "n\n1"},
    "The table has no rows below the column names": {"prompt": "{n}", "table": "n"},
    "temperature is varied twice": {"vary": [{"name": "temperature", "values": v} for v in ("1", "2")]},
    "Enter a whole number of at least 1": {"samples": "0"},
    "33 temperature x 2 samples = 66 cells: the limit is 64 cells": {
        "vary": [{"name": "temperature", "values": "0..1 x 33"}],
        "samples": 2,
    },
    "65 prompts: the limit is 64 cells": {"prompt": "{n}", "vary": [], "table": "n\n" + "1\n" * 65},
}


@pytest.mark.parametrize("message", BAD_FORMS)
def test_a_form_that_makes_no_run_shows_the_reason(call: Call, message: str) -> None:
    assert plan(call, **BAD_FORMS[message]).startswith(f"ERROR {message}")


def diff(call: Call, before: str, after: str) -> list[str]:
    marks = {"same": " ", "removed": "-", "added": "+"}
    return [marks[part["kind"]] + part["text"] for part in call("word_diff", "m.wordDiff(a[0], a[1])", before, after)]


def test_a_difference_is_shown_word_by_word(call: Call) -> None:
    assert diff(call, "the cat sat on a mat", "the dog sat on a mat.") == [
        " the ",
        "-cat",
        "+dog",
        "  sat on a mat",
        "+.",
    ]
    assert diff(call, "a red cat", "a big dog") == [" a ", "-red cat", "+big dog"]
    assert diff(call, "", "") == []
    assert diff(call, "x", "") == ["-x"]


def test_the_parts_of_a_difference_are_both_texts_whatever_they_are(call: Call) -> None:
    rng = random.Random(1)
    pairs = [["".join(rng.choices("ab .\n", k=rng.randrange(20))) for _ in "ft"] for _ in range(500)]
    found = call("word_diff", "a[0].map(([f, t]) => m.wordDiff(f, t))", pairs)
    for (before, after), parts in zip(pairs, found, strict=True):
        assert "".join(part["text"] for part in parts if part["kind"] != "added") == before
        assert "".join(part["text"] for part in parts if part["kind"] != "removed") == after


def test_at_most_two_million_pairs_of_words_are_compared(call: Call) -> None:
    """Of two texts of 2,000 words, which share little, it would be 16 million, for each of 63 cells."""
    script = """(() => {
      const [Real, sizes] = [Uint16Array, []]
      window.Uint16Array = function (size) { sizes.push(size); return new Real(size) }
      const text = (n) => Array.from({length: n}, () => 'w' + Math.floor(Math.random() * 500)).join(' ')
      for (const n of [100, 700, 720, 2000]) m.wordDiff(`a${text(n)}z`, `b${text(n)}y`)
      window.Uint16Array = Real
      return sizes
    })()"""
    assert call("word_diff", script) == [200**2, 1400**2]


# --- a run ------------------------------------------------------------------------------------------------------------

RUN = """(async () => {
  const api = {events: async function* () { yield* a[1] }}
  const run = new m.GridRun({body: {}, labels: a[0]}, api,
    (flush) => { frames.push(flush) })
  const frames = [], drawn = []
  run.cells.forEach((cell) => run.listen(cell.index, () => drawn.push(cell.index)))
  await run.start()
  frames.forEach((flush) => flush())
  const names = (cells) => cells.map((cell) => cell.index)
  return {
    states: run.cells.map((cell) => `${cell.state} ${cell.text} ${cell.reason}`), drawn, frames: frames.length,
    orders: ['given', 'mean', 'total', 'length'].map((order) => names(m.ordered(run.cells, order))),
    best: m.bestOf(run.cells)?.index, error: run.error,
  }
})()"""


def event(index: int, text: str, *logprobs: float, **fields: Any) -> dict[str, Any]:
    entries = [{"token": text, "logprob": logprob, "top_logprobs": []} for logprob in logprobs]
    return {"index": index, "text": text, "token_texts": [text] * len(entries), "logprobs": entries, **fields}


def test_cells_have_states_orders_and_a_best_one_and_one_frame_shows_many_events(call: Call) -> None:
    events = [
        event(0, "a", -1.0),
        event(1, "b", -0.1, -0.2),
        event(2, "c", -0.5),
        event(0, "A", -3.0, finish_reason="stop"),
        event(1, "B", finish_reason="length"),
        {"index": 3, "error": {"message": "prompt: is too long"}},
        event(2, "", finish_reason="cancelled"),
        {"total_prompts": 5},
    ]
    found = call("grid_run", RUN, ["", "", "", "", ""], events)
    assert found["states"] == [
        "done aA stop", "done bB length", "stopped c cancelled", "failed  prompt: is too long",
        "failed  ",
    ]  # fmt: skip
    assert found["orders"] == [[0, 1, 2, 3, 4], [1, 2, 0, 3, 4], [1, 2, 0, 3, 4], [0, 1, 2, 3, 4]]
    assert (found["best"], found["error"]) == (1, "The server ended the stream early.")
    assert (sorted(found["drawn"]), found["frames"]) == ([0, 1, 2, 3, 4], 1)
