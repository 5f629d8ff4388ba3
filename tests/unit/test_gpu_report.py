"""The pages of scripts/gpu_report.py as Markdown."""

from __future__ import annotations

from pathlib import Path

import msgspec
from gpu_report import markdown, read_report
from measuring import markdown_table

from cppbatch.bench.report import Column, Report, Spread
from cppbatch.sizing.machine import this_machine

REPORT = Report(
    kind="throughput",
    title="m: 1 | 2",
    machine=this_machine(with_llama=False),
    columns=[Column("name", "name"), Column("speed", "tok/s"), Column("nothing", "none")],
    rows=[{"name": "a|b", "speed": Spread(2.0, 1.0, 3.0), "phases": {"fill": Spread(1.0, 1.0, 1.0)}, "nothing": None}],
    notes=["A note."],
)


def test_a_report_comes_back_from_its_file_as_it_was(tmp_path: Path) -> None:
    REPORT.write_json(tmp_path / "report.json")
    assert read_report(tmp_path / "report.json") == REPORT


def test_a_reports_table_is_markdown_with_its_notes_below() -> None:
    assert markdown(REPORT) == (
        "m: 1 | 2:\n\n| name | tok/s | none |\n| --- | ---: | ---: |\n| a\\|b | 2.0 ±1.0 | - |\n\n- A note."
    )
    assert markdown_table(["x", "y"], []) == "| x | y |\n| --- | ---: |"


def test_servers_are_shown_side_by_side() -> None:
    columns = [Column("failed", "failed"), Column("speed", "tok/s", 0)]
    rows = [{"server": "ours", "failed": 0, "speed": 5.0}, {"server": "other", "failed": 1, "speed": 4.0}]
    served = msgspec.structs.replace(REPORT, kind="serve", columns=columns, rows=rows, notes=[])
    assert markdown(served).endswith(
        "|  | ours | other |\n| --- | ---: | ---: |\n| failed | 0 | 1 |\n| tok/s | 5 | 4 |"
    )
