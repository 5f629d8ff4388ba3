"""The programs that measure and photograph the page."""

from __future__ import annotations

from pathlib import Path

from tests.support.scripts import rows, script


def test_open_pages_are_measured_in_turns_beside_a_server_alone(tiny_llama: Path) -> None:
    printed = script("bench_page.py", "-m", tiny_llama, "--pages", 1, "--turns", 1, "--requests", 16, "--tokens", 64)
    figures = rows(printed)
    assert list(figures)[-4:] == ["alone", "readers of /live", "browsers, idle page", "browsers, Live tab"]
    assert figures["alone"][1] == "100.0% (100.0% to 100.0%)"
    assert all(float(figures[name][0]) > 0 for name in list(figures)[-4:])
    assert float(figures["alone"][-1]) == 0, "no browser runs meanwhile"
    assert float(figures["browsers, Live tab"][-1]) > 0


def test_a_tab_is_photographed_in_both_themes(default_model: Path, tmp_path: Path) -> None:
    script("page_screenshots.py", "-m", default_model, "--only", "models", "--to", tmp_path)
    images = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert images.keys() == {"models-light.png", "models-dark.png"}
    assert images["models-light.png"] != images["models-dark.png"]
