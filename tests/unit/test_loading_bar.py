"""While a model is loaded, a terminal shows how far it is; anything else gets nothing."""

from __future__ import annotations

import io
import re
import time
from typing import Any

import pytest
import rich.console

from cppbatch.cli.output import loading_bar


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What a terminal gets."""
    written, console = io.StringIO(), rich.console.Console

    def terminal(**_settings: Any) -> rich.console.Console:
        return console(file=written, force_terminal=True, width=80)

    monkeypatch.setattr(rich.console, "Console", terminal)
    return written


def test_a_terminal_shows_the_fraction_that_is_loaded(written: io.StringIO) -> None:
    until = time.monotonic() + 10
    with loading_bar(lambda: 0.42):
        while "42%" not in written.getvalue() and time.monotonic() < until:
            time.sleep(0.01)
    assert "loading" in written.getvalue()
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.getvalue())
    assert re.search(r"42% left: [-\d]+:", shown), shown  # and no time without a label


def test_an_error_of_loading_passes_and_ends_the_bar(written: io.StringIO) -> None:
    with pytest.raises(ValueError, match="damaged"), loading_bar(lambda: 0.5):
        raise ValueError("damaged")
    assert "\x1b[?25h" in written.getvalue()  # the cursor is back


def test_no_bar_is_written_to_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    with loading_bar(lambda: 0.42):
        pass
    assert capsys.readouterr() == ("", "")
