"""CONTRIBUTING.md names files, folders, functions and classes that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.python_names import defined_in

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
PATHS = sorted(set(re.findall(r"`((?:cppbatch|tests|scripts|docs|examples)/[\w./]*)", PAGE)))
NAMES = sorted(set(re.findall(r"`((?:cppbatch|tests)/[\w/]+\.py): ([\w.]+)`", PAGE)))


def test_the_page_names_files_and_functions() -> None:
    assert len(PATHS) > 30
    assert len(NAMES) > 20
    mentioned = re.findall(r"`[\w/]+\.py:[^`]*`", PAGE)
    assert len(mentioned) == len(re.findall(r"`(?:cppbatch|tests)/[\w/]+\.py: [\w.]+`", PAGE)), "in another form"


@pytest.mark.parametrize("path", PATHS)
def test_every_path_exists(path: str) -> None:
    assert (ROOT / path).exists()
    assert (ROOT / path).is_dir() == path.endswith("/") or "." not in Path(path).name


@pytest.mark.parametrize(("path", "name"), NAMES)
def test_every_function_and_class_is_defined_where_it_says(path: str, name: str) -> None:
    assert name in defined_in(ROOT / path)


def test_every_test_command_is_one_of_the_script() -> None:
    script = (ROOT / "scripts" / "test").read_text()
    rings = set(re.findall(r"`\./scripts/test ([\w-]+)", PAGE))
    assert {"unit", "integration", "release", "nightly"} <= rings
    for ring in rings:
        assert f"./scripts/test {ring} " in script
        assert ring == "nightly" or (ROOT / "tests" / ring.replace("-", "_")).is_dir()
