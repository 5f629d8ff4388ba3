"""Ctrl-C, SIGTERM and SIGKILL at any moment of any command: no traceback, exit code 130, and no process is left."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

if sys.platform == "win32":
    pytest.skip("Windows has no PTYs", allow_module_level=True)

from tests.support import tiny_models
from tests.support.terminal_session import end_command

_NOISE = ("Traceback", "KeyboardInterrupt", "Fatal Python error", "Exception ignored")
_EXIT_CODES = {signal.SIGINT: {130}, signal.SIGTERM: {0, 130, 143}, signal.SIGKILL: {137}}
_PYTHON_S = 0.3  # until the interpreter has started, which prints tracebacks of its own
_STEP_S = 0.05

Arguments = list[str | Path]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models and an input."""
    folder = tmp_path_factory.mktemp("interrupted")
    (folder / "models").mkdir()
    for i in range(2):
        tiny_models.llama(folder / "models" / f"{i}.gguf", seed=i)
    (folder / "input.jsonl").write_text('{"prompt": "a", "max_tokens": 50}\n' * 100)
    return folder


def commands(folder: Path) -> dict[str, Arguments]:
    model = folder / "models" / "0.gguf"
    return {
        "serve": ["serve", "-m", model, "--port", "0"],
        "serve --in-process": ["serve", "-m", model, "--port", "0", "--in-process"],
        "serve --models-dir": ["serve", "--models-dir", model.parent, "--port", "0"],
        "generate": ["generate", "-m", model, "-n", "500", "-p", "a", "-p", "b"],
        "chat": ["chat", "-m", model],
        "batch": ["batch", folder / "input.jsonl", "-m", model, "-o", folder / "output.jsonl", "--overwrite"],
        "bench": ["bench", "throughput", "-m", model],
        "tune": ["tune", "-m", model],
        "requantize": ["models", "requantize", model, "--type", "Q8_0", "--lossy", "-o", folder / "q.gguf"],
        "memory": ["memory", "-m", model],
    }


@pytest.mark.parametrize(
    ("command", "how", "moments"),
    [
        ("serve", signal.SIGINT, ["cppbatch.cluster.worker.main"]),
        ("serve", signal.SIGKILL, ["cppbatch.cluster.worker.main"]),
        ("generate", signal.SIGTERM, ["cppbatch.llama.kernels_child"]),
        ("memory", signal.SIGINT, ["cppbatch.llama.kernels_child"]),
        *(
            pytest.param(name, how, [_PYTHON_S + i * _STEP_S for i in range(80)], marks=pytest.mark.soak)
            for name in commands(Path())
            for how in _EXIT_CODES
        ),
    ],
)
def test_a_command_that_is_interrupted_at_any_moment_ends_with_all_its_processes(
    folder: Path, command: str, how: signal.Signals, moments: list[float | str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a cache where nothing about this machine is known, a start runs several children."""
    for moment in moments:
        if isinstance(moment, float) or "_child" in moment:
            monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
            shutil.rmtree(folder / "cache", ignore_errors=True)
        code, output, left = end_command(commands(folder)[command], moment, how)
        assert not [each for each in _NOISE if each in output], (moment, output)
        assert not left, moment
        if code == 0 and moment != moments[0]:  # it has ended before
            return
        assert code in _EXIT_CODES[how], (moment, output)


def test_a_second_ctrl_c_ends_a_server_at_once(folder: Path) -> None:
    code, output, left = end_command(commands(folder)["serve"], "ready at", times=2)
    assert code in (0, 130)
    assert not left
    assert not [each for each in _NOISE if each in output], output


def test_a_worker_that_cannot_load_its_model_ends_while_its_standard_input_is_open(tmp_path: Path) -> None:
    """It printed `Fatal Python error: _enter_buffered_busy`, because a thread was reading `sys.stdin`."""
    code = (
        "import sys, time; from cppbatch.cluster.worker import main\n"
        "main._exit_with_server(sys.argv[1]); time.sleep(0.2)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as worker:
        assert worker.wait(60) == 0
        assert worker.stderr
        assert worker.stderr.read() == b""
