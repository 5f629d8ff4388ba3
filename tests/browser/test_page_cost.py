"""The program that photographs the page."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.scripts import script

pytestmark = pytest.mark.nightly


def test_a_tab_is_photographed_in_both_themes(default_model: Path, tmp_path: Path) -> None:
    script("page_screenshots.py", "-m", default_model, "--only", "models", "--to", tmp_path)
    images = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert images.keys() == {"models-light.png", "models-dark.png"}
    assert images["models-light.png"] != images["models-dark.png"]
