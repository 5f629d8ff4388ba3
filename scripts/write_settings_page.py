"""Writes docs/settings.md, the table of the engine's settings, from their declarations in cppbatch/config.py.

.venv/bin/python scripts/write_settings_page.py
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from cppbatch.config import CHOICES, OPTIONS, SETTINGS, EngineConfig, flag_of

PAGE = Path(__file__).parents[1] / "docs" / "settings.md"
_START = """# Engine settings

The fields of `EngineConfig`, which are keyword arguments of `BatchInferenceEngine`, `LocalEngine`, `EngineProcess` and `generate_batch`, and flags of `cppbatch serve`, `batch`, `generate`, `chat` and others.
`cppbatch serve --help-all` shows all flags.
This page is written by `scripts/write_settings_page.py`.
"""


def page() -> str:
    """The text of the page."""
    defaults, lines = EngineConfig(""), [_START]
    for group, names in groupby(SETTINGS, lambda name: SETTINGS[name].group):
        lines += [f"## {group}\n", "| in Python | flags | variables | default | values | |", "|---|---|---|---|---|---|"]
        for name in names:
            setting = SETTINGS[name]
            flags = ", ".join(f"`{flag}`" for flag in setting.flags.split())
            ours = [f"CPPBATCH_{setting.env}"] if name in OPTIONS else []
            variables = ", ".join(f"`{each}`" for each in (*ours, *setting.llama_env.split()))
            values = ", ".join(CHOICES.get(name, ())) or (_range(name) if setting.range else setting.metavar)
            cells = (f"`{name}`", flags, variables, f"`{getattr(defaults, name)!r}`", values, setting.help)
            lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
        lines.append("")
    return "\n".join(lines)


def _range(name: str) -> str:
    setting = SETTINGS[name]
    low, high = setting.range or (0, 0)
    return setting.range_words or f"from {low} to {high}"


if __name__ == "__main__":
    PAGE.write_text(page())
