"""`cppbatch memory`: sizes by the length of a sequence, and a margin."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

from cppbatch.cli.main import cli


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, list(map(str, arguments)))


def cells_mib(model: Path, folder: Path, *arguments: str) -> float:
    file = folder / "memory.json"
    result = run("memory", "-m", model, "--json", file, *arguments)
    assert result.exit_code == 0, result.output
    rows = msgspec.json.decode(file.read_bytes())["rows"]
    return float(sum(row["predicted_mib"] for row in rows if row["kind"] == "cells"))


def test_the_length_of_a_sequence_takes_the_place_of_the_cells(tiny_llama: Path, tmp_path: Path) -> None:
    by_length = cells_mib(tiny_llama, tmp_path, "-np", "8", "--seq-len", "512")
    assert by_length == cells_mib(tiny_llama, tmp_path, "-np", "8", "-c", "4096") > 0
    assert by_length == pytest.approx(2 * cells_mib(tiny_llama, tmp_path, "-np", "4", "--seq-len", "512"))


def test_the_logits_of_draft_tokens_are_counted_where_there_are_drafts(tiny_llama: Path) -> None:
    assert "logits of drafts" in run("memory", "-m", tiny_llama).output
    assert "logits of drafts" not in run("memory", "-m", tiny_llama, "--spec", "off").output


def test_a_margin_is_shown_with_the_verdict(tiny_llama: Path) -> None:
    assert "of which 10% must stay free: will fit" in run("memory", "-m", tiny_llama, "--margin", "10").output
    assert "must stay free" not in run("memory", "-m", tiny_llama).output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["memory", "--seq-len", "512", "-c", "4096"], "--seq-len and -c exclude each other"),
        (["tune", "--batch-sizes", "1,4", "-np", "2"], "--batch-sizes and -np exclude each other"),
    ],
)
def test_flags_that_say_the_same_twice_are_refused(arguments: list[str], message: str, tiny_llama: Path) -> None:
    result = run(*arguments, "-m", tiny_llama)
    assert result.exit_code != 0
    assert message in result.output + str(result.exception)
