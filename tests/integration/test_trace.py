"""`--trace`: what each step did, and which request had which seq_id, in a file that Perfetto reads."""

from __future__ import annotations

import errno
import io
import itertools
import json
import os
from pathlib import Path
from time import sleep
from typing import Any

import pytest
from click.testing import CliRunner, Result

from cppbatch import BatchInferenceEngine, SamplingParams
from cppbatch.bench.explain import explain, plot_explanation, read_steps
from cppbatch.cli.main import cli
from cppbatch.engine.ideal import LOST
from cppbatch.engine.observe.trace import TRACKS, Trace
from cppbatch.errors import ConfigError

SETTINGS: dict[str, Any] = {"n_ctx": 512, "n_parallel": 2, "n_threads": 1}

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def spans(path: Path) -> list[dict[str, Any]]:
    return [event for event in json.loads(path.read_text()) if event.get("ph") == "X"]


def test_every_step_has_its_phases_one_after_the_other(tiny_llama: Path, tmp_path: Path) -> None:
    with BatchInferenceEngine(tiny_llama, trace=str(tmp_path / "t.json"), **SETTINGS) as engine:
        engine.add_request([5] * 6, GREEDY)
        while engine.has_work:
            engine.step()
        n_steps = engine.stats().steps
    phases = [span for span in spans(tmp_path / "t.json") if span["tid"] in TRACKS.values()]
    assert [span["name"] for span in phases] == ["schedule", "fill", "decode", "sample", "advance", "text"] * n_steps
    assert [span["args"] for span in phases if span["name"] == "decode"][:2] == [
        {"rows": 0, "prompt_tokens": 6},
        {"rows": 1, "prompt_tokens": 0},
    ]
    for one, next_one in itertools.pairwise(phases):
        assert one["ts"] + one["dur"] <= next_one["ts"] + 0.5


def test_a_seq_id_shows_which_request_prefills_and_decodes_in_it(tiny_llama: Path, tmp_path: Path) -> None:
    with BatchInferenceEngine(tiny_llama, trace=str(tmp_path / "t.json"), **SETTINGS) as engine:
        engine.generate([[5] * 20, [6] * 30, [7] * 10], GREEDY)
    lives = [span for span in spans(tmp_path / "t.json") if span["tid"] not in TRACKS.values()]
    for request in ("request-1", "request-2", "request-3"):
        theirs = [span for span in lives if span["args"]["request"] == request]
        assert [span["name"] for span in theirs] == ["prefill", "decode"]
        assert len({span["tid"] for span in theirs}) == 1
        assert theirs[-1]["args"]["generated"] == 6
    assert len({span["tid"] for span in lives}) == 2


def test_counters_show_how_many_run_and_wait(tiny_llama: Path, tmp_path: Path) -> None:
    with BatchInferenceEngine(tiny_llama, trace=str(tmp_path / "t.json"), **SETTINGS) as engine:
        engine.generate([[5] * 4] * 5, GREEDY)
    counts = [event["args"] for event in json.loads((tmp_path / "t.json").read_text()) if event.get("ph") == "C"]
    assert max(each.get("running", 0) for each in counts) == 2
    assert max(each.get("waiting", 0) for each in counts) == 3


def test_finished_events_are_in_the_file_before_the_engine_is_closed(tiny_llama: Path, tmp_path: Path) -> None:
    with BatchInferenceEngine(tiny_llama, trace=str(tmp_path / "t.json"), **SETTINGS) as engine:
        engine.generate(["Hello"], GREEDY)
        lines = [json.loads(line.removesuffix(",")) for line in (tmp_path / "t.json").read_text().splitlines()[1:]]
        assert sum(line["name"] == "advance" for line in lines) == engine.stats().steps


def test_an_existing_trace_is_not_overwritten(tiny_llama: Path, tmp_path: Path) -> None:
    for _ in range(2):
        with BatchInferenceEngine(tiny_llama, trace=str(tmp_path / "t.json"), **SETTINGS) as engine:
            engine.generate(["Hello"], GREEDY)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.2.json", "t.json"]
    assert spans(tmp_path / "t.json")
    assert spans(tmp_path / "t.2.json")


def test_a_device_gets_the_trace_and_no_file_is_put_beside_it(tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "null.json").symlink_to(os.devnull)
    with BatchInferenceEngine(tiny_llama, trace=str(tmp_path / "null.json"), **SETTINGS) as engine:
        engine.generate(["a"], GREEDY)
    assert [path.name for path in tmp_path.iterdir()] == ["null.json"]


def test_a_trace_that_was_cut_off_has_one_event_a_line(tmp_path: Path) -> None:
    trace = Trace(str(tmp_path / "t.json"))
    trace.phase("decode", 1.0, 2.0)
    trace._file.flush()  # and then the process dies
    lines = (tmp_path / "t.json").read_text().splitlines()
    assert lines[0] == "["
    span = json.loads(lines[-1].removesuffix(","))
    assert (span["name"], span["ts"], span["dur"]) == ("decode", 1e6, 1e6)


class Full(io.RawIOBase):
    """A file on a disk that has no room."""

    name = "full.json"

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_ends_the_trace_and_nothing_else(
    tiny_llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with BatchInferenceEngine(tiny_llama, trace=str(tmp_path / "t.json"), **SETTINGS) as engine:
        assert engine.core._trace
        engine.core._trace._file.close()
        engine.core._trace._file = io.BufferedWriter(Full(), 64)
        assert len(engine.generate(["Hello"], GREEDY)[0].tokens) == 6
    assert "is incomplete: No space left on device" in caplog.text


def test_a_file_that_cannot_be_written_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--trace"):
        BatchInferenceEngine(tiny_llama, trace=str(tmp_path / "none" / "t.json"), **SETTINGS)


def test_a_trace_explains_where_the_time_went(tiny_llama: Path, tmp_path: Path) -> None:
    with BatchInferenceEngine(tiny_llama, trace=str(tmp_path / "t.json"), **SETTINGS) as engine:
        engine.generate([[5] * 20, [6] * 30, [7] * 10] * 5, GREEDY)
        sleep(0.5)
        engine.generate([[8] * 40] * 3, GREEDY)
        stats = engine.stats()
    report = invoke(["bench", "explain", str(tmp_path / "t.json"), "--json", str(tmp_path / "r.json")], tmp_path)
    assert report.exit_code == 0, report.output
    found = json.loads((tmp_path / "r.json").read_text())
    seconds = {row["part"]: row["seconds"] for row in found["rows"]}
    assert list(seconds) == ["ideal", *LOST]
    assert sum(seconds.values()) == pytest.approx(found["settings"]["seconds"], rel=1e-4)
    assert found["settings"]["steps"] == stats.steps
    assert found["settings"]["decode_rows"] == stats.decode_rows
    assert seconds["waiting"] == pytest.approx(0.5, abs=0.1)
    assert 0 < found["settings"]["of_ideal"] < 1
    assert all(sum(row["over_time"]) == pytest.approx(row["seconds"], abs=1e-6) for row in found["rows"])


def test_the_lost_time_in_a_trace_is_that_of_the_engines_counters(tiny_llama: Path, tmp_path: Path) -> None:
    """Apart from the costs at best, which the engine had still to learn."""
    settings = {**SETTINGS, "n_ctx": 256, "kv_layout": "unified", "swap_space": 0, "prefix_cache": False}
    with BatchInferenceEngine(tiny_llama, trace=str(tmp_path / "t.json"), **settings) as engine:
        engine.generate([[5] * 20, [6] * 20], SamplingParams(temperature=0, max_tokens=150, ignore_eos=True))
        stats = engine.stats()
    assert stats.recomputes
    lost = {row["part"]: row["seconds"] for row in explain(tmp_path / "t.json").rows}
    for reason in ("sampling", "engine"):
        assert lost[reason] == pytest.approx(stats.lost_seconds[reason], rel=0.05)
    assert lost["computed_again"] > 0
    assert stats.lost_seconds["computed_again"] > 0


def test_a_trace_that_was_cut_off_is_explained_as_far_as_it_goes(tiny_llama: Path, tmp_path: Path) -> None:
    with BatchInferenceEngine(tiny_llama, trace=str(tmp_path / "t.json"), **SETTINGS) as engine:
        engine.generate([[5] * 20], GREEDY)
        n_steps = engine.stats().steps
    data = (tmp_path / "t.json").read_bytes()
    (tmp_path / "t.json").write_bytes(data[: len(data) * 2 // 3])
    assert 0 < len(read_steps(tmp_path / "t.json")) < n_steps


@pytest.mark.parametrize("content", [b"", b"{}", b"[\n", b"[\n{\n", b"[\n\xff,\n"])
def test_a_file_that_is_not_a_trace_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "t.json").write_bytes(content)
    with pytest.raises(ConfigError, match="--trace"):
        read_steps(tmp_path / "t.json")


def test_an_explanation_is_drawn(tiny_llama: Path, tmp_path: Path) -> None:
    with BatchInferenceEngine(tiny_llama, trace=str(tmp_path / "t.json"), **SETTINGS) as engine:
        engine.generate([[5] * 20], GREEDY)
    figure = plot_explanation(explain(tmp_path / "t.json"))
    assert [axes.get_xlabel() for axes in figure.axes] == ["% of the time", "seconds since the first step"]


def invoke(arguments: list[str], home: Path) -> Result:
    return CliRunner().invoke(cli, arguments, env={"CPPBATCH_CONFIG": str(home)})
