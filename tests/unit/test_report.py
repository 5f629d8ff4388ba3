"""What benchmarks print."""

from __future__ import annotations

from rich.console import Console

from cppbatch.bench.report import Column, Report
from cppbatch.sizing.machine import this_machine


def test_names_and_errors_with_brackets_are_shown_as_they_are() -> None:
    report = Report(
        kind="tune",
        title="[bold]model[/bold]",
        machine=this_machine(with_llama=False),
        columns=[Column("error", "error")],
        rows=[{"error": "no tensor [red] in model[1]"}],
        notes=["ended with [/x]"],  # as markup, an error
    )
    console = Console(width=160)
    with console.capture() as capture:
        console.print(report.table())
    for text in ("[bold]model[/bold]", "no tensor [red] in model[1]", "ended with [/x]"):
        assert text in capture.get()
