"""docs/performance.md lists and dates its sections, and the README's table repeats its figures."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.unit.test_pages import headings

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "performance.md"
UNDATED = {"Batch sizes"}
"""Calculated, not measured."""
ROWS = {
    "one prompt, 16 samples": ("one prompt x 16", "16 samples of a prompt"),
    "580 tokens in common": ("580 tokens in common", "580 tokens in common"),
    "nothing in common, mixed lengths": ("mixed lengths", "mixed, Q4_0"),
    "the same, llama-server with the file as downloaded": ("mixed, llama-server with the Q4_1 file", None),
}
"""Loads of the README: how the first column of "Serving" starts, and that of "Servers" on a GPU."""


def sections() -> list[tuple[str, str]]:
    """Title and text of each section; that of a subsection starts with what its section says above the first table."""
    parts = re.split(r"^(#{2,3}) (.+)$", PAGE.read_text(), flags=re.MULTILINE)[1:]
    above, found = "", []
    for level, title, text in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        above = text if level == "##" else above
        found.append((title, text if level == "##" else above.split("\n|")[0] + text))
    return found


def lines(section: str, start: str) -> list[list[str]]:
    """The rows of a load: the one whose first cell starts so, and those below it without a first cell."""
    rows = [re.split(r" *\| *", line)[1:-1] for line in dict(sections())[section].splitlines() if line.startswith("|")]
    first = next(i for i, row in enumerate(rows) if row[0].startswith(start))
    others = next((i for i in range(first + 1, len(rows)) if rows[i][0]), len(rows))
    return rows[first:others]


def figure(section: str, start: str, name: str, column: int) -> list[float]:
    """The figures of a cell as numbers, without a range in brackets; times in seconds."""
    row = next(row for row in lines(section, start) if name in row[1])
    cell = re.sub(r"\(.*\)|\*", "", row[column]).replace(",", "")
    return [float(part) / (1000 if row[1].endswith("ms") else 1) for part in cell.split(" / ")]


def test_the_list_at_the_top_leads_to_every_section_with_figures() -> None:
    listed = re.findall(r"\]\(#([\w-]+)\)", PAGE.read_text().split("\n## ")[0])
    own = {"performance", "on-a-gpu"}  # a section of sections
    assert len(listed) == len(set(listed))
    assert set(listed) == headings(PAGE) - own


@pytest.mark.parametrize("title", [title for title, _ in sections() if title not in UNDATED])
def test_each_section_has_a_date_a_machine_and_a_commit(title: str) -> None:
    text = dict(sections())[title]
    assert re.search(r"\d\d? [A-Z][a-z]+ 20\d\d", text)
    assert "EPYC" in text or "H100" in text
    assert re.search(r"`[0-9a-f]{7,8}`", text)


@pytest.mark.parametrize("load", ROWS)
def test_the_readme_repeats_figures_of_the_page(load: str) -> None:
    readme = (ROOT / "README.md").read_text()
    (row,) = (line for line in readme.splitlines() if line.startswith(f"| {load} |"))
    ratio, first_token, gap, gpu = row.strip("| ").split(" | ")[1:]
    start, gpu_start = ROWS[load]
    assert ratio == f"{figure('Serving', start, 'tokens/s', 4)[0]:.1f} times"
    ours, theirs = (figure("Serving", start, "TTFT", column)[-1] for column in (2, 3))
    assert first_token == f"{ours:.1f} s instead of {theirs:.1f}"
    ours, theirs = (figure("Serving", start, "inter-token", column)[:2][-1] for column in (2, 3))  # p95
    assert gap == f"{1000 * ours:.0f} ms instead of {1000 * theirs:.0f}"
    if gpu_start is None:
        assert gpu == "not measured"
    else:
        (measured,) = (row for row in lines("Servers", gpu_start) if row[1] == "16")
        assert gpu == f"{float(measured[4].strip('*')):.1f} times"
