"""Reports as Markdown."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from cppbatch.bench.report import Report, Spread, format_cell


def read_report(path: Path) -> Report:
    """Reads a file that `Report.write_json` wrote. Raises OSError, or `msgspec.DecodeError` for another file."""
    report = msgspec.json.decode(path.read_bytes(), type=Report)
    return msgspec.structs.replace(report, rows=[_spreads(row) for row in report.rows])


def _spreads(value: Any) -> Any:
    """Restores the `Spread`s in a decoded value: the objects with exactly their three fields."""
    if not isinstance(value, dict):
        return value
    if value.keys() == set(Spread.__struct_fields__):
        return Spread(**value)
    return {key: _spreads(each) for key, each in value.items()}


def markdown(report: Report) -> str:
    """Returns a report's table and notes. Servers, which have many figures, become columns."""
    head = [column.title for column in report.columns]
    body = [[format_cell(row.get(column.key), column.digits) for column in report.columns] for row in report.rows]
    if report.kind == "serve":
        body = [list(line) for line in zip(head, *body, strict=True)]
        head = ["", *(row["server"] for row in report.rows)]
    notes = "\n".join(f"- {note}" for note in report.notes)
    return "\n\n".join(filter(None, [f"{_in_one_line(report.title)}:", markdown_table(head, body), notes]))


def markdown_table(head: Iterable[str], body: Iterable[Iterable[str]]) -> str:
    """Returns a table; the first column is aligned left, the others right."""
    titles = list(head)
    lines = [titles, ["---", *["---:"] * (len(titles) - 1)], *body]
    return "\n".join(
        "| " + " | ".join(_in_one_line(each).replace("|", "\\|") for each in line) + " |" for line in lines
    )


def _in_one_line(text: str) -> str:
    return " ".join(text.split())
