"""RPC workers: what is refused at startup, what waits for what, and which process a lost worker is blamed on."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import click
import pytest
from click.testing import CliRunner

from cppbatch.cli.engine_options import engine_options
from cppbatch.cli.main import main
from cppbatch.cluster import rpc_server_process
from cppbatch.cluster.deployment import Deployment
from cppbatch.cluster.engines import rpc_watch, supervisor
from cppbatch.cluster.engines.process import EngineProcess
from cppbatch.cluster.engines.rpc_watch import RpcWatch, RpcWorkerLost
from cppbatch.cluster.rpc_server_process import RpcServerSetup, free_port
from cppbatch.cluster.worker.handle import WorkerDied
from cppbatch.config import EngineConfig
from cppbatch.engine.request import GenerationRequest
from cppbatch.engine.speculation.runtimes import draft_config
from cppbatch.errors import ConfigError, RpcUnreachable
from cppbatch.retries import Pauses, RestartPauses
from cppbatch.rpc_endpoint import PROTOCOL, Endpoint, check_worker, parse_endpoint, wait_for_workers
from cppbatch.sizing.profile import conditions
from tests.support.fake_workers import FakeWorker, fake_workers
from tests.support.listening import until
from tests.support.virtual_time import Clock

__all__ = ["fake_workers"]

A, B = "192.168.1.5:50052", "gpu-box:50053"

# --- settings ---------------------------------------------------------------------------------------------------------


def test_an_address_is_a_host_and_a_port() -> None:
    assert parse_endpoint(A) == Endpoint("192.168.1.5", 50052)
    assert str(parse_endpoint(B)) == B


@pytest.mark.parametrize(
    "text", ["", "gpu-box", ":50052", "gpu-box:", "::1:50052", "[::1]:50052", "a b:1", "http://a:1"]
)
def test_an_invalid_address_is_refused_with_the_form(text: str) -> None:
    with pytest.raises(ConfigError, match=r"HOST:PORT|port"):
        parse_endpoint(text)


@pytest.mark.parametrize("port", ["0", "65536", "-1", "x", "１"])
def test_ports_out_of_range_are_refused(port: str) -> None:
    with pytest.raises(ConfigError, match="1 to 65535"):
        parse_endpoint(f"gpu-box:{port}")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rpc": (A, A)}, "twice"),
        ({"rpc": tuple(f"h:{i}" for i in range(1, 17))}, "lists 16 workers; llama.cpp supports at most 15"),
        ({"rpc": (A,), "device": 0}, "--devices"),
        ({"rpc": (A,), "deterministic": True}, "other machines"),
        ({"tensor_split": (0.0, 0.0)}, r"-ts\) is 0,0"),
        ({"tensor_split": (1.0, -1.0)}, "at least 0"),
        ({"tensor_split": (float("nan"),)}, "at least 0"),
        ({"tensor_split": (1.0,) * 17}, "17 shares"),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig("m.gguf", **settings)


@pytest.mark.parametrize(
    ("flags", "variables"),
    [
        (["--rpc", f"{A},{B}", "-ts", "3,1"], {}),
        (["--rpc", f"{A}, {B}", "--tensor-split", "3/1"], {}),
        ([], {"CPPBATCH_RPC": f"{A},{B}", "CPPBATCH_TENSOR_SPLIT": "3,1"}),
        ([], {"LLAMA_ARG_RPC": f"{A},{B}", "LLAMA_ARG_TENSOR_SPLIT": "3,1"}),
    ],
)
def test_flags_and_variables_are_those_of_llama_cpp(
    flags: list[str], variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cppbatch.models.pull.choose_model", lambda given: given)
    found: list[EngineConfig] = []

    def note(config: EngineConfig) -> None:
        found.append(config)

    command = click.command()(engine_options(note))
    result = CliRunner().invoke(command, ["-m", "m.gguf", *flags], env=variables)
    assert not result.exception, result.output
    assert found == [EngineConfig("m.gguf", rpc=(A, B), tensor_split=(3.0, 1.0))]


def test_a_worker_serves_one_engine() -> None:
    for deployment in (Deployment(workers=2), Deployment(max_workers=2), Deployment(devices=(0,))):
        with pytest.raises(ConfigError, match="an RPC worker serves one engine at a time"):
            deployment.configs(EngineConfig("m.gguf", rpc=(A,)))


def test_a_draft_model_stays_on_this_machine() -> None:
    draft = draft_config(EngineConfig("m.gguf", draft_model="d.gguf", rpc=(A,), tensor_split=(1.0,)))
    assert draft
    assert (draft.rpc, draft.tensor_split) == ((), ())


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"rpc": (A,), "device_names": ("RPC0", "CUDA0")}, {"rpc": (), "device_names": ("CUDA0",)}),
        ({"rpc": (A,), "device_names": ("RPC0",)}, {"rpc": (), "device_names": (), "n_gpu_layers": 0}),
        ({"rpc": (A,), "draft_device_names": ("RPC0",)}, {"rpc": (A,), "device_names": ("RPC0",), "n_gpu_layers": -1}),
        ({"device_names": ("CUDA1",)}, {"device_names": ("CUDA1",)}),
        ({"draft_device_names": ("CUDA1",), "split_mode": "row"}, {"split_mode": "layer"}),
        ({"draft_device_names": ("A", "B"), "tensor_split": (0.0, 2.0, 1.0)}, {"tensor_split": (0.0, 2.0)}),
        ({"draft_device_names": ("A",), "tensor_split": (0.0, 1.0)}, {"tensor_split": ()}),
    ],
)
def test_a_draft_model_is_on_the_models_devices_or_on_its_own(given: dict[str, Any], expected: dict[str, Any]) -> None:
    draft = draft_config(EngineConfig("m.gguf", draft_model="d.gguf", **given))
    assert {name: getattr(draft, name) for name in expected} == expected


def test_a_profile_is_for_the_same_workers() -> None:
    plain = EngineConfig("m.gguf")
    assert not {"rpc", "tensor_split"} & conditions(plain).keys()  # profiles from before are still found
    split = [EngineConfig("m.gguf", rpc=(A,)), EngineConfig("m.gguf", rpc=(B,))]
    assert len({str(conditions(each)) for each in [plain, *split]}) == 3


# --- questions to a worker --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def listening(answer: Callable[[socket.socket], object]) -> Iterator[Endpoint]:
    """Listens, and lets `answer` do something with the first connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                connection, _ = server.accept()
                with connection:
                    answer(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield Endpoint(*server.getsockname())
        finally:
            server.close()
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", 1), 0.01):
                pass
            thread.join(10)


def hello(*version: int) -> Callable[[socket.socket], object]:
    def answer(connection: socket.socket) -> None:
        request = connection.recv(1024)
        assert struct.unpack("<BQ", request[:9]) == (14, len(request) - 9)
        connection.sendall(struct.pack("<Q", 28) + bytes(version) + bytes(25))

    return answer


def test_a_worker_of_the_same_version_is_fine() -> None:
    with listening(hello(*map(int, PROTOCOL.split(".")))) as endpoint:
        check_worker(endpoint)


@pytest.mark.parametrize("version", [(7, 0, 1), (6, 0, 0), (8, 0, 0)])
def test_a_worker_of_another_version_is_refused_in_one_line(version: tuple[int, ...]) -> None:
    with listening(hello(*version)) as endpoint, pytest.raises(ConfigError) as refused:
        check_worker(endpoint)
    line = str(refused.value)
    assert f"{endpoint} speaks version {'.'.join(map(str, version))}" in line
    assert f"requires {PROTOCOL}: install the same cppbatch version on both" in line
    assert "\n" not in line


def test_a_server_that_is_not_a_worker_is_refused() -> None:
    with (
        listening(lambda connection: connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")) as endpoint,
        pytest.raises(ConfigError, match=f"{endpoint} is not an RPC worker"),
    ):
        check_worker(endpoint)


def test_a_tunnel_without_a_worker_is_a_retryable_error() -> None:
    with (
        listening(lambda connection: connection.recv(1024)) as endpoint,
        pytest.raises(RpcUnreachable, match=f"connection to {endpoint} was closed .*: it may be a tunnel without"),
    ):
        check_worker(endpoint)


def test_a_missing_worker_is_named() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        endpoint = Endpoint(*unused.getsockname())
        with pytest.raises(
            RpcUnreachable, match=rf"cannot connect to an RPC worker at {endpoint} \(.*refused\): start"
        ):
            check_worker(endpoint)


def test_a_busy_worker_accepts_the_connection_and_sends_nothing() -> None:
    release = threading.Event()
    with listening(lambda connection: release.wait(10)) as endpoint:
        with pytest.raises(RpcUnreachable, match="one engine at a time; it may be in use by another engine"):
            check_worker(endpoint, 0.05)
        release.set()


def test_machines_that_start_together_wait_for_each_other() -> None:
    clock, lines = Clock(), list[str]()

    def check(endpoint: Endpoint) -> None:
        if clock.now < 25:
            raise RpcUnreachable(f"no RPC worker answers at {endpoint}")

    wait_for_workers(
        [parse_endpoint(A), parse_endpoint(B)], 60, lines.append, clock=clock, sleep=clock.sleep, check=check
    )
    assert 25 <= clock.now < 30
    assert lines == [f"waiting for up to 60 s: no RPC worker answers at {A}"] * 3  # at 0, 10 and 20 s


def test_waiting_has_an_end_and_another_version_is_not_waited_for() -> None:
    clock = Clock()

    def wait(error: Exception) -> None:
        def check(endpoint: Endpoint) -> None:
            raise error

        wait_for_workers([parse_endpoint(A)], 60, print, clock=clock, sleep=clock.sleep, check=check)

    with pytest.raises(RpcUnreachable):
        wait(RpcUnreachable("not there"))
    assert 60 <= clock.now < 63
    began = clock.now
    with pytest.raises(ConfigError):
        wait(ConfigError("another version"))
    assert clock.now == began


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def rpc_worker(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[list[RpcServerSetup], str]]:
    """Runs the command with flags; returns what it would serve, and the errors."""

    def run(*flags: str) -> tuple[list[RpcServerSetup], str]:
        served: list[RpcServerSetup] = []
        monkeypatch.setattr(rpc_server_process, "run_rpc_server", lambda setup, say: served.append(setup))
        monkeypatch.setattr("signal.signal", lambda *arguments: None)
        monkeypatch.setattr(sys, "argv", ["cppbatch", "rpc-worker", "--port", "0", *flags])
        with contextlib.suppress(SystemExit):
            main()
        return served, capsys.readouterr().err

    return run


def test_by_default_only_this_machine_can_connect(rpc_worker: Callable[..., Any]) -> None:
    (setup,), _ = rpc_worker()
    assert setup.host == "127.0.0.1"
    assert setup.port > 0


def test_an_address_that_others_can_reach_needs_consent(rpc_worker: Callable[..., Any]) -> None:
    served, error = rpc_worker("--host", "0.0.0.0")
    assert not served
    assert "may run code as you" in error
    assert "--i-trust-every-machine-that-can-connect" in error
    (setup,), _ = rpc_worker("--host", "0.0.0.0", "--i-trust-every-machine-that-can-connect")
    assert setup.host == "0.0.0.0"


@pytest.mark.parametrize("host", ["::1", "gpu-box", "256.1.1.1", ""])
def test_a_host_must_be_an_address_of_this_machine(rpc_worker: Callable[..., Any], host: str) -> None:
    served, error = rpc_worker("--host", host)
    assert not served
    assert repr(host) in error


def test_a_port_in_use_is_refused_with_the_reason() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(ConfigError, match="in use"):
        free_port("127.0.0.1", server.getsockname()[1])


def test_restart_delays_grow_and_are_reset_after_a_long_run() -> None:
    pauses = RestartPauses()
    assert [round(pauses.next(0.1), 1) for _ in range(9)] == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30.0]
    assert round(pauses.next(3600), 1) == 0.2


# --- a worker that goes away ------------------------------------------------------------------------------------------


async def test_the_end_of_a_worker_is_noticed_at_once() -> None:
    connections: list[asyncio.StreamWriter] = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    endpoint = Endpoint(*server.sockets[0].getsockname())
    watch = RpcWatch([endpoint])
    assert await watch.lost(0) is None
    watch.start()
    assert await watch.lost(0.1) is None
    await until(lambda: connections)
    working = asyncio.ensure_future(watch.while_there(asyncio.sleep(30)))
    connections[0].close()
    with pytest.raises(RpcWorkerLost, match=f"lost the RPC worker at {endpoint}"):
        await asyncio.wait_for(working, 5)
    assert str(endpoint) in str(await watch.lost(1))
    await watch.close()
    server.close()


async def test_without_workers_nothing_is_lost() -> None:
    watch = RpcWatch([])
    watch.start()
    assert await watch.while_there(asyncio.sleep(0, "done")) == "done"
    await watch.close()


def blamed_in(engine: EngineProcess, monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    """The requests that the supervisor blames for each death."""
    blamed: list[set[int]] = []
    monkeypatch.setattr(engine, "on_worker_died", lambda active, give_up: blamed.append(active))
    return blamed


async def test_a_lost_worker_is_waited_for_and_no_request_is_to_blame(
    fake_workers: list[FakeWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    lost: list[asyncio.Event] = []

    async def until_lost(endpoint: Endpoint) -> str:
        lost.append(asyncio.Event())
        await lost[-1].wait()
        return f"the RPC worker at {endpoint} is gone"

    is_there = threading.Event()

    def check(endpoint: Endpoint) -> None:
        if not is_there.is_set():
            raise RpcUnreachable(f"no RPC worker answers at {endpoint}")

    monkeypatch.setattr(rpc_watch, "_until_lost", until_lost)
    monkeypatch.setattr(supervisor, "check_worker", check)
    monkeypatch.setattr(supervisor, "_RPC_PAUSE_S", 0.01)
    monkeypatch.setattr(FakeWorker, "active", {1, 2}, raising=False)
    async with EngineProcess(EngineConfig("m.gguf", rpc=(A,))) as engine:
        blamed = blamed_in(engine, monkeypatch)
        with engine.open(GenerationRequest(id="a", prompt="a")):
            await until(lambda: lost)
            lost[0].set()
            await until(lambda: engine.health().error == f"no RPC worker answers at {A}")
            assert engine.health().status == "restarting"
            assert blamed == [set()]
            assert len(fake_workers) == 1  # no process is started while the RPC worker is away
            is_there.set()
            await until(lambda: engine.health().status == "ok")
            assert len(fake_workers) == 2


async def test_an_abort_that_a_lost_worker_causes_blames_no_request(
    fake_workers: list[FakeWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "check_worker", lambda endpoint: None)
    monkeypatch.setattr(supervisor, "_PAUSES", Pauses(0.02, 30.0))
    monkeypatch.setattr(rpc_watch, "_until_lost", _lost_soon)
    monkeypatch.setattr(FakeWorker, "active", {1}, raising=False)
    async with EngineProcess(EngineConfig("m.gguf", rpc=(A,))) as engine:
        blamed = blamed_in(engine, monkeypatch)
        fake_workers[0].die(WorkerDied("killed", {1}))
        await until(lambda: blamed)
        assert blamed == [set()]
        assert f"{A} is gone" in str(engine.health().error)


async def _lost_soon(endpoint: Endpoint) -> str:
    await asyncio.sleep(0.2)
    return f"the RPC worker at {endpoint} is gone"
