"""docs/architecture.md and docs/glossary.md name files, functions and classes that exist, and the path stays short."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.python_names import defined_in

ROOT = Path(__file__).parents[2]
ARCHITECTURE = (ROOT / "docs/architecture.md").read_text()
GLOSSARY = (ROOT / "docs/glossary.md").read_text()
TRACE = re.findall(r"^\d+\. .*$", ARCHITECTURE, re.MULTILINE)


def test_a_chat_request_takes_at_most_15_steps_through_at_most_25_files() -> None:
    files = {path for step in TRACE for path in re.findall(r"`([a-z_]+/[\w/]+\.py)", step)}
    assert 10 <= len(TRACE) <= 15
    assert 15 <= len(files) <= 25
    assert [path for path in files if not (ROOT / "cppbatch" / path).exists()] == []


@pytest.mark.parametrize("step", TRACE, ids=range(1, len(TRACE) + 1))
def test_every_function_of_the_trace_exists(step: str) -> None:
    named = re.findall(r"`([a-z_]+/[\w/]+\.py): ([\w.]+)`", step)
    for path, name in named:
        assert name in defined_in(ROOT / "cppbatch" / path), f"{path}: {name}"


def test_the_architecture_is_one_page() -> None:
    assert len(ARCHITECTURE.splitlines()) <= 200


def test_every_module_of_the_architecture_and_the_glossary_exists() -> None:
    paths = re.findall(
        r"`((?:bench|chat|cli|cluster|engine|jobs|llama|models|ray|server)/[\w/]+\.py)", ARCHITECTURE + GLOSSARY
    )
    assert len(paths) > 60
    assert [path for path in paths if not (ROOT / "cppbatch" / path).exists()] == []


def test_every_class_of_the_glossary_is_defined_where_it_says() -> None:
    rows = re.findall(r"^\| [^|]+ \| [^|]*`([A-Z]\w+)` \| `(\w+/[\w/]+\.py)`", GLOSSARY, re.MULTILINE)
    assert len(rows) > 20
    for name, path in rows:
        assert name in defined_in(ROOT / "cppbatch" / path), f"{path}: {name}"
