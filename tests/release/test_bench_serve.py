"""`cppbatch bench serve` as a command, and against a server of our own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cppbatch.bench.load.workload import Workload
from cppbatch.bench.prompts import Lengths
from cppbatch.cli.main import cli
from cppbatch.llama import Model
from cppbatch.server.app import create_app
from tests.support.app_thread import AppThread
from tests.support.fake_openai import FakeOpenAI, on_a_thread


def bench(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "cppbatch", "bench", "serve", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_the_command_fails_in_one_line() -> None:
    out, err = (process := bench("--url", "http://127.0.0.1:9")).communicate(timeout=30)
    assert (process.returncode, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith("error: ")
    assert "http://127.0.0.1:9 (Connection refused)" in line


def test_ctrl_c_shows_what_was_measured_so_far() -> None:
    fake = FakeOpenAI(between=0.01)
    with on_a_thread(fake.app()) as url:
        process = bench("--url", url, "--requests", "1000", "--output-tokens", "4", "--concurrency", "2")
        while len(fake.bodies) < 20 and process.poll() is None:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (0, "")
    assert "of 1000 requests had ended" in " ".join(out.split())
    assert "output tokens/s" in out


def test_our_own_server_gives_all_tokens_and_no_repeat_finds_its_prompts_cached(
    tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = AppThread({"model": tiny_llama, "n_ctx": 4096, "n_parallel": 4, "n_threads": 1}, create_app)
    sizes = (
        "--requests 8 --concurrency 4 --repeats 2 --prompt-tokens 8-32 --output-tokens 4-16 --latency-bound-ms 60000"
    )
    files = ["--json", str(tmp_path / "load.json"), "--plot", str(tmp_path / "load.png")]
    try:
        cli(["bench", "serve", "--url", f"ours={server.url}", *sizes.split(), *files], standalone_mode=False)
    finally:
        server.stop()
    written = json.loads((tmp_path / "load.json").read_text())
    (figures,) = written["rows"]
    assert (figures["server"], figures["requests"], figures["failed"]) == ("ours", 16, 0)
    output = figures["output_tokens_per_second"]["high"] * figures["seconds"]["low"]  # of the faster repeat
    assert output == pytest.approx(sum(Lengths(4, 16).spread(8)), rel=0.01)
    assert figures["cached_percent"]["high"] < 5
    assert figures["goodput_per_second"] == figures["requests_per_second"]
    assert (tmp_path / "load.png").stat().st_size > 10_000
    assert "TTFT, ms: p50" in capsys.readouterr().out


def test_the_client_does_not_load_llama_cpp() -> None:
    modules = "cppbatch.bench.load.compare_servers, cppbatch.bench.load.results"
    code = f"import sys, {modules}; print('llama_cpp' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_prompts_have_about_as_many_tokens_as_asked(default_model: Path) -> None:
    with Model(default_model) as model:
        for n in (20, 128, 580):
            workload = Workload(kind="fixed", n_requests=4, prompt_tokens=Lengths(n, n), output_tokens=Lengths(1, 1))
            for request in workload.requests(1, 0):
                assert abs(len(model.vocab.tokenize(str(request.prompt))) - n) <= 1 + n // 20
