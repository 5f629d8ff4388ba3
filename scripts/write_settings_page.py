"""Writes the tables of settings in docs/: those of the engine (cppbatch/config.py) make up settings.md, and those of
sampling (cppbatch/engine/params.py) are the last section of sampling.md.

.venv/bin/python scripts/write_settings_page.py
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

import click

from cppbatch.cli.sampling_options import sampling_default_options
from cppbatch.config import CHOICES, OPTIONS, SETTINGS, EngineConfig
from cppbatch.engine.params import PARAMS, SamplingParams

_DOCS = Path(__file__).parents[1] / "docs"
_START = """# Engine settings

The fields of `EngineConfig`: keyword arguments of `BatchInferenceEngine`, `LocalEngine`, `EngineProcess` and
`generate_batch`, and options of `cppbatch serve`, `generate`, `chat`, `batch` and the commands that measure.
`cppbatch serve --help-all` shows all options of the server.
`scripts/write_settings_page.py` writes this page from `cppbatch/config.py`.
"""
_SAMPLING = """## Fields, flags and ranges

`scripts/write_settings_page.py` writes this section from `cppbatch/engine/params.py`.

"""
_HEAD = "| in Python | flags | variables | default | values | meaning |\n|---|---|---|---|---|---|"


def pages() -> dict[Path, str]:
    """The text of each page."""
    sampling = _DOCS / "sampling.md"
    written_by_hand = sampling.read_text().partition(_SAMPLING)[0]
    return {_DOCS / "settings.md": _engine_page(), sampling: written_by_hand + _sampling_section()}


def _engine_page() -> str:
    defaults, lines = EngineConfig(""), [_START]
    for group, names in groupby(SETTINGS, lambda name: SETTINGS[name].group):
        lines += [f"## {group}\n", _HEAD]
        for name in names:
            setting = SETTINGS[name]
            variables = [*([f"CPPBATCH_{setting.env}"] if name in OPTIONS else []), *setting.llama_env.split()]
            values = ", ".join(CHOICES.get(name, ())) or setting.range_text or setting.metavar
            lines.append(_row(name, setting.flags.split(), variables, getattr(defaults, name), values, setting.help))
        lines.append("")
    return "\n".join(lines)


def _sampling_section() -> str:
    options = {each.name: each for each in click.command(sampling_default_options(print)).params}
    defaults, lines = SamplingParams(), [_SAMPLING + _HEAD]
    for name, param in PARAMS.items():
        values = f"from {param.range.low} to {param.range.high}" if param.range else ""
        option = options[name]
        lines.append(_row(name, option.opts, option.envvar or (), getattr(defaults, name), values, param.help))
    return "\n".join(lines) + "\n"


def _row(name: str, flags: Iterable[str], variables: Iterable[str], default: object, *texts: str) -> str:
    quoted = [", ".join(f"`{each}`" for each in several) for several in (flags, variables)]
    return f"| {' | '.join((f'`{name}`', *quoted, f'`{default!r}`', *texts))} |"


if __name__ == "__main__":
    for page, text in pages().items():
        page.write_text(text)
