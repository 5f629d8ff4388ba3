"""The programs that measure and photograph the page."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.scripts import columns, number, script

pytestmark = pytest.mark.nightly


def test_open_pages_are_measured_in_turns_beside_a_server_alone(tiny_llama: Path) -> None:
    names = ["readers", "idle-page", "live-page"]
    printed = script("bench_beside.py", ",".join(names), "-m", tiny_llama, "--pages", 1, "--turns", 1, "--seconds", 2)
    figures = columns(printed)
    assert list(figures) == ["alone", *names]
    assert figures["alone"]["tokens/s, of alone"] == "1.00 (1.00 to 1.00)"
    assert all(number(each["tokens/s"]) > 0 for each in figures.values())
    assert number(figures["alone"]["browsers CPU"]) == 0, "no browser runs meanwhile"
    assert number(figures["live-page"]["browsers CPU"]) > 0


def test_a_tab_is_photographed_in_both_themes(default_model: Path, tmp_path: Path) -> None:
    script("page_screenshots.py", "-m", default_model, "--only", "models", "--to", tmp_path)
    images = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert images.keys() == {"models-light.png", "models-dark.png"}
    assert images["models-light.png"] != images["models-dark.png"]
