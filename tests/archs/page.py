"""docs/models-supported.md: the results of the ring, and the reasons for failed checks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import msgspec

from cppbatch.llama.library import PINNED_VERSION
from tests.archs.ring import LAYOUTS, ROOT, Found, Results, architecture_of

PAGE = ROOT / "docs" / "models-supported.md"
_MARK = "<!-- written by `./scripts/test archs` -->\n"
_COLUMNS = {
    "text": ("alone", "batch", "swap", "full"),
    "prefix": ("prefix",),
    "turns": ("turns",),
    "samples": ("samples",),
    "drafts": ("drafts", "suffix", "rollback", "rows"),
    "shift": ("shift",),
    "files": ("slots",),
    "estimate": ("memory",),
    "vectors": ("vectors",),
}
"""The columns of the table, and the checks that each of them sums up."""
_COUNTED = {"prefix", "turns"}
"""Columns that show the tokens taken from the cache where there are any."""


class Limit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A word that is expected instead of "yes"."""

    check: str
    word: str
    reason: str
    memory: list[str] = []
    """Prefixes of kinds of memory."""
    architectures: list[str] = []

    def covers(self, architecture: str, memory: str, check: str, word: str) -> bool:
        parts = memory.split(" + ")
        return (
            (self.check, self.word) == (check, word)
            and (not self.architectures or architecture in self.architectures)
            and (not self.memory or any(part.startswith(kind) for kind in self.memory for part in [memory, *parts]))
        )


@cache
def limits() -> tuple[Limit, ...]:
    known = msgspec.toml.decode((Path(__file__).parent / "known.toml").read_bytes(), type=dict[str, list[Limit]])
    return tuple(known["limits"])


def limit_for(architecture: str, found: Found, check: str) -> Limit | None:
    """The reason for a result other than "yes"; None if it is unknown."""
    word = found.words[check]
    return next((each for each in limits() if each.covers(architecture, found.memory, check, word)), None)


def surprises(name: str, found: Found) -> Iterator[str]:
    """A line for each failed check without a known reason."""
    for check, word in found.words.items():
        if word != "yes" and not limit_for(architecture_of(name), found, check):
            yield f"{check}: {word}: {found.details.get(check, '')}"


def table(results: Results) -> str:
    """A row for each architecture."""
    lines = [f"| architecture | memory | {' | '.join(_COLUMNS)} |", "|---" * (len(_COLUMNS) + 2) + "|"]
    names = sorted(results)
    for architecture in sorted({architecture_of(name) for name in names}):
        found = [
            results[name][layout]
            for name in names
            if architecture_of(name) == architecture
            for layout in LAYOUTS
            if layout in results[name]
        ]
        if all(each.words.get("load") == "refused" for each in found):
            reason = limit_for(architecture, found[0], "load")
            lines.append(f"| {architecture} | refused: {reason.reason if reason else ''} |{' |' * len(_COLUMNS)}")
            continue
        cells = [_unique(_cell(each, column) for each in found) for column in _COLUMNS]
        lines.append(f"| {architecture} | {_unique(each.memory for each in found)} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(found: Found, column: str) -> str:
    """One word for the checks of a column: the first that is not "yes"; "-" where none was run."""
    words = [found.words[check] for check in _COLUMNS[column] if check in found.words]
    word = next((word for word in words if word != "yes"), "yes" if words else "-")
    detail = found.details.get(column, "")
    if column in _COUNTED and word in ("yes", "some") and detail.startswith("cached "):
        counts = [int(n) for n in detail.removeprefix("cached ").partition(";")[0].partition(" of")[0].split(", ")]
        return str(counts[0]) if len(set(counts)) == 1 else ", ".join(map(str, counts[:3]))
    return word


def _unique(words: Iterator[str]) -> str:
    """The words of the forms and layouts of a model: one where they are the same."""
    return " / ".join(dict.fromkeys(words))


def reasons(results: Results) -> str:
    """A line for each limit that was met."""
    met: dict[tuple[str, str, str], set[str]] = {}
    for name, layouts in results.items():
        for found in layouts.values():
            for check, word in found.words.items():
                if word != "yes":
                    limit = limit_for(architecture_of(name), found, check)
                    column = next((column for column, checks in _COLUMNS.items() if check in checks), check)
                    met.setdefault((column, word, limit.reason if limit else "?"), set()).add(architecture_of(name))
    lines = ["| column | word | why | architectures |", "|---|---|---|---|"]
    for (column, word, reason), names in sorted(met.items()):
        shown = ", ".join(sorted(names)) if len(names) <= 12 else str(len(names))
        lines.append(f"| {column} | {word} | {reason} | {shown} |")
    return "\n".join(lines) + "\n"


def write_page(results: Results) -> None:
    """Replaces what follows the mark in the page."""
    intro = PAGE.read_text("utf-8").partition(_MARK)[0]
    n_runs = sum(map(len, results.values()))
    head = (
        f"{len({architecture_of(name) for name in results})} architectures, {len(results)} models, {n_runs} runs, "
        f"llama-cpp-python {PINNED_VERSION}.\n"
    )
    PAGE.write_text(
        f"{intro}{_MARK}\n{head}\n{table(results)}\n## What does not hold, and why\n\n{reasons(results)}", "utf-8"
    )
