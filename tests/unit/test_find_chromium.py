"""The Chromium that tests/browser uses, and the message if there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.browser import chromium


@pytest.fixture(autouse=True)
def no_browser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty PATH, and no browser of Playwright's."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CPPBATCH_CHROMIUM", raising=False)
    monkeypatch.setattr(chromium, "of_playwright", lambda: tmp_path / "not-fetched" / "chrome")


def program(path: Path) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_without_a_browser_the_command_fails_with_one_line_that_says_how_to_get_one() -> None:
    with pytest.raises(SystemExit) as ended:
        chromium.main()
    line = str(ended.value.code)  # a text: printed to stderr, with exit code 1
    assert "\n" not in line
    for remedy in ("apt install chromium", "playwright install chromium", "CPPBATCH_CHROMIUM"):
        assert remedy in line


def test_the_variable_goes_first_then_the_path_then_the_browser_of_playwright(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched = program(tmp_path / "not-fetched" / "chrome")
    assert chromium.find_chromium() == fetched
    on_path = program(tmp_path / "google-chrome")
    assert chromium.find_chromium() == on_path
    named = program(tmp_path / "mine")
    monkeypatch.setenv("CPPBATCH_CHROMIUM", str(named))
    assert chromium.find_chromium() == named


def test_a_variable_that_names_no_program_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path / "chromium")
    monkeypatch.setenv("CPPBATCH_CHROMIUM", "/no/such/browser")
    with pytest.raises(chromium.NoChromiumError, match="CPPBATCH_CHROMIUM=/no/such/browser is no program"):
        chromium.find_chromium()
