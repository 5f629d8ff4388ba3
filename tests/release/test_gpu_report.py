"""scripts/gpu_report.py, run without a GPU on a tiny model, with parts that fail."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from server_process import ChildProcess, free_port, run_with_timeout

from cppbatch.sizing.machine import this_machine
from tests.support.batch_files import wait_until
from tests.support.fake_peers import write_llama_server, write_program

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu_report.py"

BATCHED_BENCH = """
import sys
print("llama_context: n_ctx =", sys.argv[sys.argv.index("-c") + 1])
print("|    PP |     TG |    B |")
print("|-------|--------|------|")
for n in sys.argv[sys.argv.index("-npl") + 1].split(","):
    print("|", " | ".join([sys.argv[sys.argv.index("-npp") + 1], sys.argv[sys.argv.index("-ntg") + 1], n]), "|")
"""


@pytest.fixture(scope="module")
def peers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("peers")
    write_program(folder / "bin" / "llama-batched-bench", BATCHED_BENCH)
    write_llama_server(folder / "bin" / "llama-server")
    return folder


def gpu_report(folder: Path, *args: str | Path) -> dict[str, str]:
    """The report's sections by their headings."""
    file = folder / "report.md"
    command = [sys.executable, str(SCRIPT), "-ngl", "0", "--small", "-o", str(file), *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    sections: dict[str, str] = {}
    heading = ""
    for line in file.read_text().splitlines():
        heading = line.lstrip("# ") if line.startswith("#") else heading
        sections[heading] = sections.get(heading, "") + line + "\n"
    return sections


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path, peers: Path) -> dict[str, str]:
    return gpu_report(tmp_path_factory.mktemp("report"), "-m", tiny_llama, "--peers", peers)


@pytest.mark.nightly
def test_it_reports_the_machine_and_that_there_is_no_gpu(report: dict[str, str]) -> None:
    assert f"| cpu | {this_machine(with_llama=False).cpu} |" in report["Machine and build"]
    assert "**No GPU was there" in report["Machine and build"]


@pytest.mark.nightly
def test_the_peers_benchmark_runs_at_the_engines_points_in_both_layouts(report: dict[str, str]) -> None:
    for name, has_flag in (("unified", True), ("per-sequence", False)):
        section = report[f"llama-batched-bench, {name}"]
        assert ("-kvu" in section) is has_flag
        assert "| 16 | 8 | 1 |\n| 16 | 8 | 2 |" in section
        assert "llama_context" not in section


@pytest.mark.nightly
def test_the_engine_is_measured_in_both_layouts_with_the_phases_of_a_step(report: dict[str, str]) -> None:
    section = report["The engine, and where the time of a step goes"]
    for layout in ("unified", "per-sequence"):
        assert section.count(f"| {layout} |") == 4, "two batch sizes, in two tables"
    assert "| schedule | fill | decode | sample | advance |" in section


@pytest.mark.nightly
def test_sampling_is_measured_on_the_host_and_on_the_device(report: dict[str, str]) -> None:
    assert "sampling on the host" in report["Sampling: host"]
    assert "sampling on the device" in report["Sampling: backend"]


@pytest.mark.nightly
def test_servers_are_compared_and_one_that_does_not_start_is_reported_and_left_out(report: dict[str, str]) -> None:
    section = report["Servers under load"]
    assert "**Failed**: llama-server-bs ended with exit code 1." in section
    assert "this device cannot sample" in section
    assert "|  | ours | llama-server |" in section
    assert "| of them failed | 0 | 0 |" in section


@pytest.mark.nightly
def test_the_report_has_the_test_result(report: dict[str, str]) -> None:
    assert "passed" in report["Tests"]
    assert "1 part failed;" in report["Tests"]


@pytest.mark.nightly
def test_without_peers_and_without_time_every_part_gives_the_reason_that_it_is_empty(tmp_path: Path) -> None:
    sections = gpu_report(tmp_path, "-m", tmp_path / "none.gguf", "--minutes", "0.03")
    for name in ("unified", "per-sequence"):
        assert "was not measured: --peers was not given" in sections[f"llama-batched-bench, {name}"]
    for name in ("The engine, and where the time of a step goes", "Tests"):
        assert "not begun, because the time for the whole report" in sections[name]


def test_invalid_options_are_refused_at_once(tmp_path: Path) -> None:
    for flags, message in (
        (["-o", tmp_path / "none" / "report.md"], "there is no folder"),
        (["--minutes", "0"], "--minutes is 0: must be above 0"),
    ):
        done = subprocess.run(
            [sys.executable, str(SCRIPT), *map(str, flags)], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 2
        assert message in done.stderr


def python(program: str) -> list[str]:
    return [sys.executable, "-c", program]


def test_a_child_that_ends_well_gives_its_output_and_others_their_reason() -> None:
    well = run_with_timeout(python("import sys; print('one', flush=True); print('two', file=sys.stderr)"), 30)
    assert (well.output, well.failure) == ("one\ntwo\n", None)
    badly = run_with_timeout(python("print('so far', flush=True); raise SystemExit(3)"), 30)
    assert (badly.output, badly.failure) == ("so far\n", "it ended with exit code 3")
    missing = run_with_timeout(["no-such-program-anywhere"], 30)
    assert missing.failure
    assert missing.failure.startswith("it could not be started: ")


def test_a_child_that_runs_out_of_time_is_gone_with_all_it_started_and_its_output_is_kept() -> None:
    outcome = run_with_timeout(["sh", "-c", "sleep 60 & echo $!; wait"], 1.5)
    assert outcome.failure == "it was stopped after its time limit of 2 s"
    assert outcome.seconds < 50
    grandchild = int(outcome.output)
    wait_until(  # a killed process ends when it gets a core
        lambda: not psutil.pid_exists(grandchild) or psutil.Process(grandchild).status() == psutil.STATUS_ZOMBIE
    )


def test_sigterm_ends_a_script_with_the_servers_that_it_started() -> None:
    program = (
        f"import sys, time; sys.path.append({str(SCRIPT.parent)!r}); from server_process import ChildProcess\n"
        "with ChildProcess(['sleep', '60']) as child:\n"
        "    print(child.pid, flush=True)\n"
        "    time.sleep(60)"
    )
    with subprocess.Popen(python(program), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as started:
        assert started.stdout
        child = int(started.stdout.readline())
        started.terminate()
        assert started.wait(30) != 0
    assert not psutil.pid_exists(child)


def test_waiting_for_a_server_that_never_answers_or_ends_stops_at_the_timeout() -> None:
    url = f"http://127.0.0.1:{free_port()}/health"
    with ChildProcess(python("import time; time.sleep(60)")) as child:
        assert child.wait_for(url, 0.5) == "was not ready after 0 s"
    with ChildProcess(python("raise SystemExit('no')")) as child:
        assert child.wait_for(url, 30) == "ended with exit code 1"
        assert child.output() == "no\n"
