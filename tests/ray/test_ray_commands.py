"""`cppbatch serve --ray`, `cppbatch ray` and `serve deploy` as users run them, each in a separate process."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.server_process import ServerProcess

ROOT = Path(__file__).parents[2]
SETTINGS = ("-c", "2048", "-np", "4", "-t", "1", "--spec", "off", "--no-profile")

pytestmark = pytest.mark.timeout(150)


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where Ray, the records and the logs of this test's processes are."""
    path = Path(tempfile.mkdtemp(prefix="cppbatch-", dir="/tmp"))  # short: paths of sockets have a limit
    monkeypatch.setenv("RAY_TMPDIR", str(path))
    monkeypatch.setenv("XDG_STATE_HOME", str(path / "state"))
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", uuid.uuid4().hex)  # and not the user's
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    yield path
    shutil.rmtree(path, ignore_errors=True)


def command(*args: str, seconds: float = 60) -> subprocess.CompletedProcess[str]:
    whole = [sys.executable, "-m", "cppbatch", *args]
    return subprocess.run(whole, capture_output=True, text=True, timeout=seconds, check=False)


def wait_for(condition: Callable[[], Any], seconds: float = 30) -> Any:
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end
        time.sleep(0.1)
    return found


def post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def completion(url: str, n_tokens: int = 16) -> Any:
    settings = {"max_tokens": n_tokens, "temperature": 0, "ignore_eos": True}
    return post(f"{url}/v1/completions", {"prompt": "The sky is", **settings})


def replica_rows(status: str) -> list[list[str]]:
    return [line.split() for line in status.splitlines() if re.search(r" (STARTING|RUNNING|STOPPING) ", line)]


def test_a_cluster_started_by_the_command_from_start_to_down(tiny_llama: Path, folder: Path) -> None:
    with ServerProcess("--ray", "-m", tiny_llama, *SETTINGS, in_group=True) as server:
        server.wait_ready()
        printed = "".join(server.lines)
        assert "starting a Ray cluster on this machine ...\nRay cluster: started on this machine, 127.0.0.1:" in printed
        assert "it ends with this command (Ctrl-C)" in printed
        assert "deploying 1 replica of the model, with 1 CPU each ...\n" in printed
        assert str(folder) in printed  # where the logs are
        before = completion(server.url)["choices"][0]["text"]

        status = command("ray", "status")
        assert (status.returncode, status.stderr) == (0, "")
        ((_, state, pid, machine, cpus, _),) = replica_rows(status.stdout)
        assert (state, machine, cpus) == ("RUNNING", "127.0.0.1", "1")

        os.kill(int(pid), signal.SIGKILL)  # the only replica: the next one answers
        assert completion(server.url)["choices"][0]["text"] == before
        wait_for(lambda: any("has died" in line for line in server.errors))

        processes = psutil.Process(server.process.pid).children(recursive=True)
        down = command("ray", "down")
        assert down.returncode == 0
        assert down.stdout.endswith("the replicas and its Ray cluster have ended\n")
        assert server.wait() == 0
        _, left = psutil.wait_procs(processes, timeout=20)
        assert left == []
        assert command("ray", "status").stdout == "this user has no `cppbatch serve --ray` running on this machine\n"
        noise = re.compile(r"raylet|gcs_|core_worker|ray\.serve| serve \d+ -- ")
        assert [line for line in server.lines + server.errors if noise.search(line)] == []  # it is in a file


def test_ctrl_c_in_the_terminal_lets_streams_finish(tiny_llama: Path) -> None:
    with ServerProcess("--ray", "-m", tiny_llama, *SETTINGS, in_group=True) as server:
        server.wait_ready()
        body = {"prompt": "The sky is", "max_tokens": 1500, "ignore_eos": True, "stream": True}
        request = urllib.request.Request(
            f"{server.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as stream:
            stream.readline()
            os.killpg(server.process.pid, signal.SIGINT)  # as a terminal does: to all processes of the command
            rest = stream.read().decode()
        assert '"finish_reason":"length"' in rest
        assert rest.endswith("data: [DONE]\n\n")
        assert server.wait() == 0
        assert "stopping the replicas and the Ray cluster ...\n" in server.lines


def test_a_killed_front_takes_its_cluster_with_it(tiny_llama: Path) -> None:
    with ServerProcess("--ray", "-m", tiny_llama, *SETTINGS) as server:
        server.wait_ready()
        processes = psutil.Process(server.process.pid).children(recursive=True)
        agents = {process for process in processes if process.name().endswith("Agent")}
        assert len(agents) < len(processes)
        server.process.kill()
        try:
            _, left = psutil.wait_procs([process for process in processes if process not in agents], timeout=30)
            assert left == []
        finally:
            for agent in agents:  # they end too, after a minute
                with contextlib.suppress(psutil.NoSuchProcess):
                    agent.kill()
        assert command("ray", "status").stdout == "this user has no `cppbatch serve --ray` running on this machine\n"


def test_replicas_follow_the_load_and_drain(tiny_llama: Path) -> None:
    flags = ("--ray", "--replicas", "1..2", "--downscale-delay", "3", "-m", tiny_llama, *SETTINGS, "-np", "2")
    with ServerProcess(*flags, in_group=True) as server, ThreadPoolExecutor(12) as clients:
        server.wait_ready()
        assert "deploying 1 to 2 replicas of the model, depending on load, with 1 CPU each ...\n" in server.lines

        def said(pattern: str) -> list[str]:
            return [line for line in server.errors if re.search(pattern, line)]

        def load() -> int:
            """One client after the other in each of 12 threads, until the second replica runs."""
            n_requests = 0
            while len(said(r"replica \w+ runs on 127\.0\.0\.1 \(pid \d+\)")) < 2:
                assert completion(server.url, 900)["usage"]["completion_tokens"] == 900
                n_requests += 1
            return n_requests

        counts = [future.result(90) for future in [clients.submit(load) for _ in range(12)]]
        assert min(counts) > 0
        assert said("scaling to 2 replicas from 1")
        wait_for(lambda: said("scaling to 1 replica from 2"), 60)
        wait_for(lambda: said("replica .* has ended"), 30)
        assert not said("has died")
        assert completion(server.url)["choices"]


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nonsense", "ray://127.0.0.1:1", "auto"])
def test_a_wrong_address_is_one_line(tiny_llama: Path, address: str) -> None:
    refused = command("serve", "--ray", address, "-m", str(tiny_llama), *SETTINGS)
    assert refused.returncode == 2
    assert len(refused.stderr.splitlines()) == 1
    assert refused.stderr.startswith(f"error: --ray {address}")


def test_a_broken_model_is_one_line(folder: Path) -> None:
    model = folder / "broken.gguf"
    model.write_bytes(b"GGUF" + b"\xff" * 100)
    refused = command("serve", "--ray", "-m", str(model), *SETTINGS, seconds=120)
    assert refused.returncode == 2
    errors = [line for line in refused.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "broken.gguf" in errors[0]
    assert "Traceback" not in refused.stderr


def free_ports(n: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(n)]
        return [each.getsockname()[1] for each in sockets]


@pytest.fixture
def ray_head(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, str]]:
    """`ray start --head`: the cluster's address, and that of its dashboard, which `serve deploy` calls."""
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # loopback only
    port, dashboard, agent, grpc, client = free_ports(5)
    ray = Path(sys.executable).with_name("ray")
    started = subprocess.Popen(
        [
            ray, "start", "--head", "--block", f"--port={port}", "--num-cpus=4", "--node-ip-address=127.0.0.1",
            "--include-dashboard=true", f"--dashboard-port={dashboard}", f"--dashboard-agent-listen-port={agent}",
            f"--dashboard-agent-grpc-port={grpc}", f"--ray-client-server-port={client}", "--disable-usage-stats",
            "--object-store-memory=100000000",
        ],
        stdout=(folder / "ray-start").open("w"), stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    try:
        wait_for(lambda: "Ray runtime started" in (folder / "ray-start").read_text(), 60)
        yield f"127.0.0.1:{port}", f"http://127.0.0.1:{dashboard}"
    finally:
        processes = psutil.Process(started.pid).children(recursive=True)
        for process in processes:  # and not `ray stop`, which would end other clusters too
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        started.kill()
        started.wait(10)
        psutil.wait_procs(processes, timeout=10)


def test_a_joined_cluster_continues(tiny_llama: Path, ray_head: tuple[str, str]) -> None:
    address, _ = ray_head
    with ServerProcess("--ray", "auto", "-m", tiny_llama, *SETTINGS, in_group=True) as server:
        server.wait_ready()
        assert any(
            line.startswith(f"Ray cluster: joined {address}, 1 machine; it keeps running") for line in server.lines
        )
        assert completion(server.url)["choices"][0]["text"]
        server.interrupt()
        assert server.wait() == 0
        assert "stopping the replicas ...\n" in server.lines

    with ServerProcess("--ray", address, "-m", tiny_llama, *SETTINGS, in_group=True) as server:
        server.wait_ready()
        server.process.kill()
        server.wait()
        status = command("ray", "status")  # its replicas continue, and are found
        assert "(killed: `cppbatch ray down` stops its replicas)" in status.stdout
        assert [row[1] for row in replica_rows(status.stdout)] == ["RUNNING"]
        down = command("ray", "down")
        assert (down.returncode, down.stderr) == (0, "")
        assert f"the replicas have ended; the Ray cluster at {address} keeps running\n" in down.stdout
        assert command("ray", "status").stdout == "this user has no `cppbatch serve --ray` running on this machine\n"


def test_the_example_file_is_served_by_serve_deploy(
    tiny_llama: Path, ray_head: tuple[str, str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, dashboard = ray_head
    (port,) = free_ports(1)
    text = (ROOT / "examples" / "ray_serve.yaml").read_text()
    text = text.replace("port: 8000", f"port: {port}").replace("# model: /models/my.gguf", f"model: {tiny_llama}")
    file = folder / "ray_serve.yaml"
    file.write_text(text.replace("server:   ", f"server:\n        data_dir: {folder}/data\n         "))
    monkeypatch.setenv("RAY_DASHBOARD_ADDRESS", dashboard)
    serve = Path(sys.executable).with_name("serve")
    sent = subprocess.run([serve, "deploy", str(file)], timeout=60, capture_output=True, text=True, check=False)
    assert sent.returncode == 0, sent.stdout + sent.stderr
    url = f"http://127.0.0.1:{port}"

    def is_ready() -> bool:
        with contextlib.suppress(OSError, ValueError), urllib.request.urlopen(f"{url}/ready", timeout=5) as answer:
            return bool(answer.status == 200)
        return False

    wait_for(is_ready, 90)
    with urllib.request.urlopen(f"{url}/v1/models", timeout=10) as answer:
        assert json.load(answer)["data"][0]["id"] == "assistant"  # an alias in the file
    assert completion(url, 5)["usage"]["completion_tokens"] == 5
    body = {"prompt": "The sky is", "max_tokens": 5, "ignore_eos": True, "stream": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.read().endswith(b"data: [DONE]\n\n")
    with pytest.raises(urllib.error.HTTPError) as refused:  # `limits` of the file
        completion(url, 513)
    assert refused.value.code == 400
    assert "max_tokens" in refused.value.read().decode()
