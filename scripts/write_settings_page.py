"""Writes docs/settings.md, the table of the engine's settings, from their declarations in cppbatch/config.py.

.venv/bin/python scripts/write_settings_page.py
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from cppbatch.config import CHOICES, OPTIONS, SETTINGS, EngineConfig

PAGE = Path(__file__).parents[1] / "docs" / "settings.md"
_START = """# Engine settings

The fields of `EngineConfig`: keyword arguments of `BatchInferenceEngine`, `LocalEngine`, `EngineProcess` and
`generate_batch`, and options of `cppbatch serve`, `generate`, `chat`, `batch` and the commands that measure.
`cppbatch serve --help-all` shows all options of the server.
`scripts/write_settings_page.py` writes this page from `cppbatch/config.py`.
"""
_HEAD = "| in Python | flags | variables | default | values | meaning |\n|---|---|---|---|---|---|"


def page() -> str:
    """The text of the page."""
    defaults, lines = EngineConfig(""), [_START]
    for group, names in groupby(SETTINGS, lambda name: SETTINGS[name].group):
        lines += [f"## {group}\n", _HEAD]
        for name in names:
            setting = SETTINGS[name]
            flags = ", ".join(f"`{flag}`" for flag in setting.flags.split())
            ours = [f"CPPBATCH_{setting.env}"] if name in OPTIONS else []
            variables = ", ".join(f"`{each}`" for each in (*ours, *setting.llama_env.split()))
            values = ", ".join(CHOICES.get(name, ())) or setting.range_text or setting.metavar
            default = f"`{getattr(defaults, name)!r}`"
            lines.append(f"| `{name}` | {flags} | {variables} | {default} | {values} | {setting.help} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page())
