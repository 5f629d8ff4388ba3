"""docs/architecture.md and docs/glossary.md name packages, files, functions and classes that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.python_names import defined_in

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "cppbatch"
ARCHITECTURE = (ROOT / "docs/architecture.md").read_text()
GLOSSARY = (ROOT / "docs/glossary.md").read_text()
PACKAGES = sorted(folder.name for folder in PACKAGE.iterdir() if (folder / "__init__.py").exists())
PATHS = sorted(set(re.findall(rf"`((?:{'|'.join(PACKAGES)})/[\w/]*(?:\.py)?)", ARCHITECTURE + GLOSSARY)))
NAMES = sorted(set(re.findall(r"`(\w+/[\w/]+\.py): ([\w.]+)`", ARCHITECTURE)))
CLASSES = re.findall(r"^\| [^|]+ \| [^|]*`([A-Z]\w+)` \| `(\w+/[\w/]+\.py)`", GLOSSARY, re.MULTILINE)


def test_every_package_is_in_the_table() -> None:
    assert set(re.findall(r"^\| `(\w+)` \|", ARCHITECTURE, re.MULTILINE)) == set(PACKAGES)


@pytest.mark.parametrize("path", PATHS)
def test_every_file_and_folder_exists(path: str) -> None:
    assert (PACKAGE / path).exists()


@pytest.mark.parametrize(("path", "name"), [*NAMES, *((path, name) for name, path in CLASSES)])
def test_every_function_and_class_is_defined_where_it_says(path: str, name: str) -> None:
    assert name in defined_in(PACKAGE / path)
