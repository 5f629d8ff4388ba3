"""`cppbatch memory`: sizes by the length of a sequence, and a margin."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

from cppbatch.cli.main import cli
from cppbatch.config import EngineConfig
from cppbatch.models import attention_times
from cppbatch.sizing import estimate_child
from cppbatch.sizing.estimate import MemoryEstimate


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, list(map(str, arguments)))


def cells_mib(model: Path, folder: Path, *arguments: str) -> float:
    file = folder / "memory.json"
    result = run("memory", "-m", model, "--json", file, *arguments)
    assert result.exit_code == 0, result.output
    rows = msgspec.json.decode(file.read_bytes())["rows"]
    return float(sum(row["predicted_mib"] for row in rows if row["kind"] == "cells"))


def test_a_child_process_estimates_what_this_one_does(
    tiny_llama: Path, ask_child: Callable[[list[EngineConfig]], MemoryEstimate]
) -> None:
    configs = [EngineConfig(str(tiny_llama), n_ctx=n_ctx) for n_ctx in (256, 512)]
    theirs, ours = (
        [[buffer for buffer in each.buffers if buffer.kind != "process"] for each in estimate(configs).footprints]
        for estimate in (ask_child, estimate_child.estimate)
    )
    assert theirs == ours
    assert len(ours[0]) > 3


def test_seq_len_replaces_the_number_of_cells(tiny_llama: Path, tmp_path: Path) -> None:
    by_length = cells_mib(tiny_llama, tmp_path, "-np", "8", "--seq-len", "512")
    assert by_length == cells_mib(tiny_llama, tmp_path, "-np", "8", "-c", "4096") > 0
    assert by_length == pytest.approx(2 * cells_mib(tiny_llama, tmp_path, "-np", "4", "--seq-len", "512"))


@pytest.mark.usefixtures("ask_child")
def test_the_overhead_over_one_sequence_is_shown_by_number_and_length_with_the_goal(
    tiny_llama: Path, tmp_path: Path
) -> None:
    """In a child: of one sequence, the memory of this process would be most."""
    file, plot = tmp_path / "memory.json", tmp_path / "memory.png"
    result = run("memory", "-m", tiny_llama, "--overhead", "--json", file, "--plot", plot)
    assert result.exit_code == 0, result.output
    report = msgspec.json.decode(file.read_bytes())
    assert [row["batch_size"] for row in report["rows"]] == [3, 8, 16, 32, 64]
    for name in ("over_64", "over_240", "over_2048"):
        column = [row[name] for row in report["rows"]]
        assert column == sorted(column)
        assert column[0] >= 0
    assert all(row["over_64"] < row["over_2048"] for row in report["rows"])
    n_over = sum(value > 50 for row in report["rows"] for name, value in row.items() if name != "batch_size")
    assert f"the goal of 50% over one sequence is exceeded at {n_over} of 30 sizes, first with" in report["notes"][0]
    assert plot.stat().st_size > 1000
    # the same as of the two engines
    totals = []
    for n in ("1", "16"):
        assert run("memory", "-m", tiny_llama, "-np", n, "--seq-len", "240", "--json", file).exit_code == 0
        totals.append(sum(row["predicted_mib"] for row in msgspec.json.decode(file.read_bytes())["rows"]))
    assert report["rows"][2]["over_240"] == pytest.approx(100 * (totals[1] / totals[0] - 1), abs=0.5)


def test_the_logits_of_draft_tokens_are_counted_if_there_are_drafts(tiny_llama: Path) -> None:
    assert "logits of drafts" in run("memory", "-m", tiny_llama).output
    assert "logits of drafts" not in run("memory", "-m", tiny_llama, "--spec", "off").output


def test_a_margin_is_shown_with_the_verdict(tiny_llama: Path) -> None:
    assert "of which 10% must stay free: will fit" in run("memory", "-m", tiny_llama, "--margin", "10").output
    assert "must stay free" not in run("memory", "-m", tiny_llama).output


def test_windows_and_states_are_shown_with_the_checkpoints_that_fit(tiny_swa: Path, tiny_hybrid: Path) -> None:
    window, states = (" ".join(run("memory", "-m", model).output.split()) for model in (tiny_swa, tiny_hybrid))
    assert "(a window of " in window
    assert "(states: " in states
    assert "--prefix-cache-ram 1024 holds " in window
    assert "--prefix-cache-ram 1024 holds " in states


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["memory", "--seq-len", "512", "-c", "4096"], "--seq-len and -c cannot be combined"),
        (["memory", "--batch-size", "64", "--seq-len", "512"], "for 64 parallel sequences give -np 64"),
        (["memory", "--overhead", "-np", "4"], "leave out -np"),
        (["memory", "--shape", "7B"], "--shape and -m cannot be combined"),
        (["tune", "--batch-sizes", "1,4", "-np", "2"], "--batch-sizes and -np cannot be combined"),
    ],
)
def test_duplicate_flags_are_refused(arguments: list[str], message: str, tiny_llama: Path) -> None:
    result = run(*arguments, "-m", tiny_llama)
    assert result.exit_code != 0
    assert message in result.output + str(result.exception)


def test_shape_replaces_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_times, "child_command", lambda: ["false"])  # attention is not timed
    file = tmp_path / "memory.json"
    small = ("--type", "Q8_0", "-np", "2", "--seq-len", "256", "--json", file)
    assert run("memory", "--shape", "1B", *small).exit_code in (0, 1)
    rows = msgspec.json.decode(file.read_bytes())["rows"]
    mib = {kind: sum(row["predicted_mib"] for row in rows if row["kind"] == kind) for kind in ("weights", "cells")}
    assert mib["weights"] >= 1.2e9 * 8.5 / 8 / 2**20
    assert mib["cells"] == pytest.approx(16 * 2 * 2 * 8 * 64 * 512 / 2**20)


def test_the_exit_code_shows_whether_it_fits(tiny_llama: Path) -> None:
    assert run("memory", "-m", tiny_llama).exit_code == 0
    result = run("memory", "-m", tiny_llama, "-c", str(2**31 - 1))
    assert (result.exit_code, "will NOT fit" in result.output) == (1, True)
