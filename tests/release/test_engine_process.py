"""EngineProcess: when workers die, requests end as in an undisturbed run, except those that crash workers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import zmq

from cppbatch import FinishReason, GenerationEvent, GenerationRequest, SamplingParams
from cppbatch.cluster import link, sockets
from cppbatch.cluster.engines import supervisor
from cppbatch.cluster.engines.in_flight import InFlightRequest
from cppbatch.cluster.engines.process import EngineProcess
from cppbatch.cluster.link import LoadFailed
from cppbatch.cluster.worker import handle
from cppbatch.config import EngineConfig
from cppbatch.engine.params import replace_fields
from cppbatch.engine.request import ResumeState
from cppbatch.errors import EngineClosed, GenerationFailed, InvalidRequest, LibraryError, ModelError
from tests.support import preloaded
from tests.support.failing_runtimes import POISON
from tests.support.http_client import http_to
from tests.support.listening import until
from tests.support.submitting import run, together

pytestmark = pytest.mark.usefixtures("no_pause")
SETTINGS: dict[str, Any] = {
    "n_ctx": 2048, "n_parallel": 16, "n_threads": 1, "flash_attn": "off", "cache_type_k": "f32", "cache_type_v": "f32",
}  # fmt: skip


@pytest.fixture(autouse=True)
def nothing_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No process and no file is left after a test."""
    before = processes()
    folder = tempfile.mkdtemp(prefix="t")  # a short path, for the sockets
    monkeypatch.setattr(tempfile, "tempdir", folder)
    yield
    assert processes() <= before
    os.rmdir(folder)


def processes() -> set[psutil.Process]:
    """The running workers of this process."""
    ours = psutil.Process().children()
    workers = {child for child in ours if "cppbatch.cluster.worker.main" in child.cmdline()}
    return workers | set(preloaded.preloader().running() if preloaded.is_used else [])


@contextlib.asynccontextmanager
async def opened(model: Path, runtime: str | None = None, **settings: Any) -> AsyncIterator[EngineProcess]:
    runtime = runtime and f"tests.support.failing_runtimes:{runtime}"
    async with EngineProcess(model, runtime=runtime, **SETTINGS | settings) as engine:
        yield engine


def request(
    name: object, prompt: str | list[int] | None = None, max_tokens: int = 40, **params: Any
) -> GenerationRequest:
    params = {"temperature": 0, "ignore_eos": True, **params}
    text = f"{name} and {name}" if prompt is None else prompt
    return GenerationRequest(id=str(name), prompt=text, params=SamplingParams(max_tokens=max_tokens, **params))


KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.2},
    {"temperature": 0.9, "repetition_penalty": 1.3, "presence_penalty": 0.5},
    {"temperature": 1.0, "json_schema": {"type": "array", "items": {"type": "integer"}, "minItems": 12}},
    {"temperature": 1.0, "typical_p": 0.9, "dry_multiplier": 0.8},
    {"logprobs": 2, "echo": True},
]


def sixteen() -> list[GenerationRequest]:
    """Sixteen requests of all kinds, with seeds."""
    kinds = [{"seed": i, "ignore_eos": "json_schema" not in KINDS[i % 6], **KINDS[i % 6]} for i in range(16)]
    return [request(i, max_tokens=40, **kind) for i, kind in enumerate(kinds)]


Told = tuple[object, ...]


def told(events: list[GenerationEvent]) -> Told:
    """All that a client sees, except times."""
    tokens = [token for event in events for token in event.tokens]
    logprobs = [(entry.token, entry.text_offset) for event in events for entry in event.logprobs]
    last = events[-1]
    assert last.usage
    counts = last.usage.prompt_tokens, last.usage.completion_tokens
    return "".join(event.text for event in events), tokens, logprobs, last.finish_reason, last.seed, counts


@pytest.fixture(scope="module")
def undisturbed(tiny_llama: Path) -> list[Told]:
    """What the clients of `sixteen` see if no worker dies."""

    async def run_all() -> list[Told]:
        async with opened(tiny_llama) as engine:
            return [told(events) for events in await together(engine, sixteen())]

    return asyncio.run(run_all())


def pid_of(engine: EngineProcess) -> int | None:
    worker = engine._supervisor.worker
    return worker.pid if worker else None


def has_another_worker(engine: EngineProcess, pid: int) -> bool:
    return pid_of(engine) != pid


async def test_a_request_continues_where_another_engine_stopped(tiny_llama: Path) -> None:
    its = request("a", temperature=1.0, seed=7, max_tokens=60)
    async with opened(tiny_llama) as first:
        whole = await run(first, its)
    tokens = [token for event in whole for token in event.tokens]
    so_far = ResumeState(tokens=tokens[:25], age=3.0, first_token_seconds=0.5)
    async with opened(tiny_llama) as second:
        rest = []
        with second.open(its, so_far) as outputs:
            while not outputs.finished:
                rest.append(await outputs.get())
    assert [token for event in rest for token in event.tokens] == tokens[25:]
    assert "".join(event.text for event in whole).endswith("".join(event.text for event in rest))
    usage = rest[-1].usage
    assert usage
    assert usage.completion_tokens == 60
    assert usage.first_token_seconds == pytest.approx(0.5)
    assert usage.total_seconds > 3


# --- workers that die -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_clients_do_not_notice_that_workers_die_or_hang(
    tiny_llama: Path, undisturbed: list[Told], how: signal.Signals
) -> None:
    async with opened(tiny_llama, step_timeout=2) as engine:
        n_told = 0

        async def one(its: GenerationRequest) -> list[GenerationEvent]:
            nonlocal n_told
            events = []
            async for event in engine.submit(its):
                events.append(event)
                n_told += 1
                if n_told in (100, 250):
                    os.kill(pid_of(engine) or 0, how)
            return events

        disturbed = await asyncio.wait_for(asyncio.gather(*(one(its) for its in sixteen())), 120)
        assert [told(events) for events in disturbed] == undisturbed
        (state,) = await engine.workers()
        assert (state.restarts, state.health.status) == (2, "ok")
        assert (await engine.stats()).running == 0


async def test_requests_that_arrive_without_a_worker_wait_for_the_next(tiny_llama: Path) -> None:
    async with opened(tiny_llama) as engine:
        os.kill(pid_of(engine) or 0, signal.SIGKILL)
        await until(lambda: engine.health().status == "restarting")
        assert (await engine.stats()).running == 0  # as last reported
        (events,) = await together(engine, [request("late")])
        assert told(events)[3] is FinishReason.LENGTH
        await engine.check(request("also late"))


async def test_a_cancelled_request_ends_when_its_worker_dies_before_it_handles_the_cancel(tiny_llama: Path) -> None:
    async with opened(tiny_llama) as engine:
        events = engine.submit(request("a", max_tokens=1500))
        await anext(events)
        os.kill(pid_of(engine) or 0, signal.SIGSTOP)
        await engine.cancel("a")
        os.kill(pid_of(engine) or 0, signal.SIGKILL)
        rest = [event async for event in events]
        assert rest[-1].finish_reason is FinishReason.CANCELLED


async def test_a_bug_in_the_supervision_costs_a_worker_and_no_request(
    tiny_llama: Path, undisturbed: list[Told], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tiny_llama) as engine:
        real, n_said = engine.on_worker_message, 0

        def on_worker_message(message: Any) -> None:
            nonlocal n_said
            n_said += 1
            if n_said == 8:
                raise ZeroDivisionError("a bug")
            real(message)

        monkeypatch.setattr(engine, "on_worker_message", on_worker_message)
        assert [told(events) for events in await together(engine, sixteen())] == undisturbed
        assert (engine._supervisor.restarts, engine.health().status) == (1, "ok")


async def test_a_request_that_cannot_be_sent_fails_alone(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = InFlightRequest.message

    def message(sent: InFlightRequest) -> Any:
        if sent.request.cache_salt == "bad":
            raise OverflowError("can't serialize ints >= 2**64")
        return real(sent)

    monkeypatch.setattr(InFlightRequest, "message", message)
    async with opened(tiny_llama) as engine:
        bad = [msgspec.structs.replace(request(f"bad {i}"), cache_salt="bad") for i in range(20)]
        answers = await asyncio.gather(*(run(engine, its) for its in [*bad, request("a")]), return_exceptions=True)
        assert all(isinstance(answer, GenerationFailed) and "2**64" in str(answer) for answer in answers[:20])
        assert isinstance(answers[20], list)
        with pytest.raises(GenerationFailed):
            await engine.check(bad[0])
        assert engine.in_flight == 0
        os.kill(pid_of(engine) or 0, signal.SIGKILL)
        (events,) = await together(engine, [request("b")])
        assert told(events)[3] is FinishReason.LENGTH


# --- requests that kill workers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("runtime", ["aborts", "fails", pytest.param("hangs", marks=pytest.mark.soak)])
async def test_a_request_that_crashes_workers_fails_alone(
    tiny_llama: Path, undisturbed: list[Told], runtime: str
) -> None:
    async with opened(tiny_llama, runtime, step_timeout=2) as engine:
        neighbours = sixteen()[:15]
        *others, poisonous = await together(engine, [*neighbours, request("bad", [5, 6, POISON, 7])])
        assert poisonous[-1].finish_reason is FinishReason.ERROR
        assert "3 times in a row" in (poisonous[-1].error or "")
        assert [told(events) for events in others] == undisturbed[:15]
        assert engine._supervisor.restarts == 3
        assert told((await together(engine, neighbours))[0]) == undisturbed[0]


async def test_a_request_that_a_worker_cannot_decode_is_refused_alone(tiny_llama: Path) -> None:
    async with opened(tiny_llama) as engine:
        asked = asyncio.create_task(together(engine, sixteen()[:4]))
        refused = replace_fields(request("type"), clamp_max_tokens="x")
        with pytest.raises(InvalidRequest, match="request: is invalid"):
            await together(engine, [refused])
        with pytest.raises(InvalidRequest, match="request: is invalid"):
            await engine.check(refused)
        assert all(events[-1].finish_reason is not FinishReason.ERROR for events in await asked)
        assert engine._supervisor.restarts == 0


async def test_a_text_that_crashes_the_tokeniser_fails_alone(tiny_llama: Path) -> None:
    async with opened(tiny_llama, "dies_of_texts") as engine:
        texts = [*(request(i, max_tokens=200) for i in range(6)), request("bad", "this is poison")]
        *others, poisonous = await together(engine, texts)
        assert poisonous[-1].finish_reason is FinishReason.ERROR
        assert all(events[-1].finish_reason is FinishReason.LENGTH for events in others)
        with pytest.raises(GenerationFailed, match="3 times in a row"):
            await engine.check(request("bad", "this is poison"))


async def test_a_bug_in_preparation_fails_its_request_and_ends_no_worker(tiny_llama: Path) -> None:
    async with opened(tiny_llama, "raises_on_texts") as engine:
        *others, (failed,) = await together(engine, [*sixteen()[:4], request("bad", "this is poison")])
        assert failed.finish_reason is FinishReason.ERROR
        assert "TypeError: a bug" in (failed.error or "")
        assert all(events[-1].finish_reason is not FinishReason.ERROR for events in others)
        with pytest.raises(InvalidRequest, match="TypeError: a bug"):
            await engine.check(request("bad", "this is poison"))
        assert engine._supervisor.restarts == 0


async def test_a_prompt_that_hangs_in_preparation_fails_alone(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handle, "_MAX_PREPARATION_S", 0.5)
    async with opened(tiny_llama, "hangs_on_texts", step_timeout=2) as engine:
        texts = [*(request(i, max_tokens=200) for i in range(6)), request("bad", "this is poison")]
        *others, poisonous = await together(engine, texts)
        assert "3 times in a row" in (poisonous[-1].error or "")
        assert all(events[-1].finish_reason is FinishReason.LENGTH for events in others)


LONG_TEXT = "<|im_end|>" * 5000


async def test_a_cancelled_prompt_is_not_tokenised_to_its_end(tiny_llama: Path) -> None:
    """Tokenising takes 0.5 s for each part of the text here, 24 s for all."""
    async with opened(tiny_llama, "slow_texts") as engine:
        running = asyncio.ensure_future(run(engine, request("long", LONG_TEXT)))
        await until(lambda: 0 in engine._supervisor.worker._status.preparing(), 15)  # type: ignore[union-attr]
        running.cancel()
        await until(lambda: not engine._supervisor.worker._status.preparing(), 15)  # type: ignore[union-attr]


async def test_the_times_of_a_request_include_its_preparation(tiny_llama: Path) -> None:
    async with opened(tiny_llama, "slow_texts") as engine:
        *_, last = await run(engine, request("long", "<|im_end|>" * 1500, max_tokens=2))
        assert last.usage
        assert last.usage.queue_seconds >= 0.5


async def test_long_texts_do_not_delay_short_ones(tiny_llama: Path) -> None:
    async with opened(tiny_llama, "slow_texts") as engine:
        long = [asyncio.ensure_future(run(engine, request(f"long {i}", LONG_TEXT))) for i in range(4)]
        await until(engine._supervisor.worker._status.preparing)  # type: ignore[union-attr]
        for i in range(4):
            (events,) = await together(engine, [request(i)])
            assert events[-1].finish_reason is FinishReason.LENGTH
        assert not any(each.done() for each in long)
        for each in long:
            each.cancel()


async def test_slow_grammars_do_not_delay_others(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handle, "_STOP_S", 0.1)  # a worker that reads a grammar closes when it has been read
    slow = [
        request(f"slow {i}", json_schema={"type": "integer", "multipleOf": 99_999_989 + i}, ignore_eos=False)
        for i in range(4)
    ]
    known = request("known", guided_choice=["yes", "no"], ignore_eos=False)
    new = request("new", guided_choice=["new"], ignore_eos=False)
    async with opened(tiny_llama) as engine:
        await run(engine, known)
        running = [asyncio.ensure_future(run(engine, its)) for its in slow]
        await until(engine._supervisor.worker._status.preparing)  # type: ignore[union-attr]
        for quick in (known, known, known, new):
            (events,) = await together(engine, [quick])
            assert events[-1].finish_reason is FinishReason.STOP
        assert not any(each.done() for each in running)
        for each in running:
            each.cancel()


async def test_an_external_kill_blames_no_request(tiny_llama: Path) -> None:
    """Six kills before any request gets a token: three in a row by either signal would be enough to blame one."""
    async with opened(tiny_llama, "slow_to_start") as engine:
        running = asyncio.ensure_future(together(engine, sixteen()))
        for how in (signal.SIGKILL, signal.SIGKILL, signal.SIGKILL, signal.SIGUSR1, signal.SIGUSR1, signal.SIGUSR1):
            await until(lambda: engine._supervisor.worker and engine._supervisor.worker._status.active())
            pid = pid_of(engine) or 0
            os.kill(pid, how)
            await until(partial(has_another_worker, engine, pid))
        ends = [events[-1] for events in await running]
        assert {end.finish_reason for end in ends} <= {FinishReason.LENGTH, FinishReason.STOP}


async def test_an_out_of_memory_kill_blames_the_request(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel counts such kills; where it has no counter, every SIGKILL may be one."""
    counters = tmp_path / "vmstat"
    monkeypatch.setattr(handle, "_KERNEL_COUNTERS", counters)
    async with opened(tiny_llama, "kills_itself") as engine:
        (events,) = await together(engine, [request("bad", [5, 6, POISON, 7])])
        assert "3 times in a row" in (events[-1].error or "")
    counters.write_text("nr_free_pages 5\noom_kill 7\n")
    assert handle._oom_kills() == 7


# --- loading ----------------------------------------------------------------------------------------------------------


async def test_a_death_while_loading_is_an_error_and_not_retried(tiny_llama: Path) -> None:
    with pytest.raises(ModelError, match="died: killed by SIGILL"):
        async with opened(tiny_llama, "dies_while_loading", repack="off") as engine:
            pytest.fail(f"it loaded: {engine.health()}")


async def test_a_model_that_no_worker_can_compute_is_named_with_llama_cpps_assertion(tiny_llama: Path) -> None:
    async with opened(tiny_llama, "aborts_in_every_step") as engine:
        first, second = [(await together(engine, [request(text)]))[0][-1].error or "" for text in ("a", "b")]
        assert "3 times in a row while processing this request" in first
        assert f"the model {engine.info.name} (llama " in second
        assert "5 workers died" in second
        assert "killed by SIGABRT: ggml.c:1797: GGML_ASSERT(view) failed" in second
        assert engine.health().status == "failed"
        assert (engine.health().error or "nothing") in second
        async with http_to(engine) as http:
            answer = await http.post("/v1/completions", json={"prompt": "a"})
            assert answer.status == 503
            assert "GGML_ASSERT(view) failed" in (await answer.json())["error"]["message"]
            answer = await http.get("/health")
            assert (answer.status, "GGML_ASSERT(view) failed" in (await answer.json())["error"]) == (503, True)


async def test_a_build_with_a_fast_path_that_kills_the_worker_is_used_without_it(tiny_llama: Path) -> None:
    async with opened(tiny_llama, "dies_on_the_fast_path") as engine:
        (events,) = await together(engine, [request("a")])
        assert told(events)[3] is FinishReason.LENGTH
        assert engine._supervisor.restarts == 1


@pytest.fixture
def model(tiny_llama: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(tiny_llama, tmp_path / "model.gguf"))


async def test_workers_that_keep_dying_fail_their_requests_and_a_later_one_brings_it_back(model: Path) -> None:
    hidden = model.with_suffix(".hidden")
    async with opened(model) as engine:
        os.rename(model, hidden)
        os.kill(pid_of(engine) or 0, signal.SIGKILL)
        await until(lambda: engine.health().status == "restarting")
        (events,) = await together(engine, [request("a")])
        assert events[-1].finish_reason is FinishReason.ERROR
        assert "could not be reloaded" in (events[-1].error or "")
        assert engine.health().status == "failed"
        with pytest.raises(EngineClosed, match="failed"):
            await run(engine, request("b"))
        os.rename(hidden, model)
        await until(lambda: engine.health().status == "ok")
        (events,) = await together(engine, [request("a")])
        assert told(events)[3] is FinishReason.LENGTH


# --- the link ---------------------------------------------------------------------------------------------------------


async def test_without_sockets_in_files_the_link_is_loopback_and_encrypted(
    tiny_llama: Path, undisturbed: list[Told], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cppbatch.cluster.worker.handle.can_use_files", lambda folder: False)
    async with opened(tiny_llama) as engine:
        worker = engine._supervisor.worker
        assert worker
        endpoint = worker._link.endpoint
        assert endpoint.startswith("tcp://127.0.0.1:")
        with zmq.Context() as context, context.socket(zmq.PUSH) as stranger:  # without the keys
            stranger.linger = 0
            stranger.connect(endpoint)
            stranger.send(b"not a message")
            assert [told(events) for events in await together(engine, sixteen())] == undisturbed
        assert engine._supervisor.restarts == 0


async def test_a_worker_that_breaks_the_protocol_is_replaced(tiny_llama: Path) -> None:
    async with opened(tiny_llama) as engine:
        worker = engine._supervisor.worker
        assert worker
        running = asyncio.ensure_future(together(engine, [request("a", max_tokens=200)]))
        with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
            socket.connect(worker._link.endpoint)
            socket.send(b"not a message")
            ((*_, last),) = await running
        assert last.finish_reason is FinishReason.LENGTH
        await until(lambda: engine._supervisor.restarts == 1)


def test_short_paths_are_for_files_and_long_ones_are_not() -> None:
    assert sockets.can_use_files(Path("/tmp/x"))
    assert not sockets.can_use_files(Path("/" + "x" * 200))


# --- the server's process ---------------------------------------------------------------------------------------------

PARENT = """
import asyncio, sys
from cppbatch.cluster.engines.process import EngineProcess

async def main():
    async with EngineProcess(sys.argv[1], n_ctx=256, n_parallel=2, n_threads=1) as engine:
        assert "llama_cpp" not in sys.modules
        (worker,) = await engine.workers()
        print(worker.pid, engine._supervisor.worker._folder, flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""


def test_a_worker_ends_with_the_servers_process_which_needs_no_llama_cpp(tiny_llama: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT, str(tiny_llama)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout
        pid, folder = parent.stdout.readline().split()
        worker = psutil.Process(int(pid))
        parent.kill()
        worker.wait(10)
        assert not Path(folder).exists()


def test_interrupting_the_whole_group_leaves_the_worker_to_the_servers_process(tiny_llama: Path) -> None:
    """Ctrl-C goes to every process of the terminal; the server's decides when its worker ends."""
    command = [sys.executable, "-c", PARENT, str(tiny_llama)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as parent:
        assert parent.stdout
        worker = psutil.Process(int(parent.stdout.readline().split()[0]))
        worker.send_signal(signal.SIGINT)
        worker.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        assert worker.is_running()
        assert worker.status() != psutil.STATUS_ZOMBIE
        parent.kill()
        worker.wait(10)


@pytest.mark.parametrize("n_bytes", [0, 20, None], ids=["no setup", "half a setup", "a setup"])
def test_a_worker_without_its_server_logs_nothing(tiny_llama: Path, tmp_path: Path, n_bytes: int | None) -> None:
    """Its folder is removed while it starts. Ctrl-C while the model loads showed a traceback of the worker."""
    (tmp_path / "link").mkdir()
    setup = link.WorkerSetup(
        config=EngineConfig(model_path=str(tiny_llama), n_ctx=256, n_parallel=2, n_threads=1),
        folder=str(tmp_path / "link"),
        endpoint=f"ipc://{tmp_path}/link/socket",
        log_level=30,
    )
    command = [sys.executable, "-m", "cppbatch.cluster.worker.main"]
    line = msgspec.json.encode(setup) + b"\n"
    done = subprocess.run(command, input=line[:n_bytes], capture_output=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == (b"", b"")


def test_errors_of_loading_keep_their_type() -> None:
    error = supervisor._load_error(LoadFailed("LibraryError", "no library"))
    assert type(error) is LibraryError
    assert str(error) == "no library"


# --- over HTTP --------------------------------------------------------------------------------------------------------


async def test_over_http_the_crashing_request_gets_a_500_and_the_others_their_answers(tiny_llama: Path) -> None:
    async with opened(tiny_llama, "aborts") as engine, http_to(engine) as http:

        async def ask(prompt: str | list[int]) -> tuple[int, dict[str, Any]]:
            body = {"prompt": prompt, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
            async with http.post("/v1/completions", json=body) as answer:
                return answer.status, await answer.json()

        prompts = [f"{i} and {i}" for i in range(15)]
        undisturbed = [answer["choices"][0]["text"] for _, answer in await asyncio.gather(*map(ask, prompts))]
        *others, (status, error) = await asyncio.gather(*map(ask, prompts), ask([5, 6, POISON, 7]))
        assert (status, error["error"]["code"]) == (500, "generation_failed")
        assert [answer["choices"][0]["text"] for _, answer in others] == undisturbed
        async with http.get("/health") as answer:
            assert (answer.status, (await answer.json())["status"]) == (200, "ok")
