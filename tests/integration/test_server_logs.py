"""Request ids, the access log, and the format of log lines."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from cppbatch.server.app import create_app
from cppbatch.server.http import api_errors
from cppbatch.server.observe import log_setup
from cppbatch.server.observe.log_setup import set_up
from tests.support.fixtures import engine_of
from tests.support.http_client import Http
from tests.support.listening import HeldEngine, connect, head, listening, post_bytes, until

HELLO: dict[str, Any] = {"prompt": "Hello", "max_tokens": 2}

engine = engine_of(HeldEngine, n_ctx=256, n_parallel=2, is_held=False)


class Log:
    """What is written to stderr."""

    def __init__(self, captured: pytest.CaptureFixture[str]) -> None:
        self._captured, self._text = captured, ""

    @property
    def text(self) -> str:
        self._text += self._captured.readouterr().err
        return self._text

    def entries(self, logger: str = "cppbatch.access") -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.text.splitlines()]
        return [line for line in lines if line["logger"] == logger]


@pytest.fixture
def log(capsys: pytest.CaptureFixture[str]) -> Iterator[Log]:
    """Puts the handlers of the tests back in the end."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    for handler in handlers:
        root.removeHandler(handler)  # so that `set_up` does not close them
    yield Log(capsys)
    root.handlers[:] = handlers
    root.setLevel(level)
    log_setup.access_log.disabled = False


async def test_every_answer_names_its_request(http: Http) -> None:
    for method, path, body in (
        ("GET", "/health", None),
        ("GET", "/nothing", None),
        ("DELETE", "/v1/models", None),
        ("POST", "/v1/completions", HELLO),
        ("POST", "/v1/completions", {**HELLO, "stream": True}),
        ("POST", "/v1/completions", {"prompt": 5}),
    ):
        async with http.request(method, path, json=body, headers={"X-Request-Id": "mine-1"}) as answer:
            assert answer.headers["X-Request-Id"] == "mine-1"
        async with http.request(method, path, json=body) as one, http.request(method, path, json=body) as other:
            assert one.headers["X-Request-Id"] != other.headers["X-Request-Id"]
            assert len(one.headers["X-Request-Id"]) == 32


@pytest.mark.parametrize("given", ["", "two words", "x" * 129, "naïve", "tab\there"])
async def test_an_id_that_cannot_be_shown_is_replaced(engine: HeldEngine, given: str) -> None:
    async with listening(create_app(engine)) as listener:
        reader, writer = await connect(listener)
        writer.write(head("GET", "/health", f"X-Request-Id: {given}"))
        answer = (await reader.readuntil(b"\r\n\r\n")).decode()
        (shown,) = [line[14:] for line in answer.split("\r\n") if line.startswith("X-Request-Id: ")]
        assert shown != given
        assert len(shown) == 32
        writer.close()


async def test_each_request_is_one_complete_line(http: Http, log: Log) -> None:
    set_up("json")
    async with http.post("/v1/completions?secret=1", json=HELLO, headers={"X-Request-Id": "a"}) as answer:
        size = len(await answer.read())
    async with http.post("/v1/completions", json={**HELLO, "stream": True}) as answer:
        streamed = len(await answer.read())
    async with http.get("/no%0Athing%22") as answer:
        assert answer.status == 404
    whole, stream, missing = log.entries()
    assert (whole["method"], whole["path"], whole["status"], whole["bytes"]) == ("POST", "/v1/completions", 200, size)
    assert (whole["request_id"], whole["remote"], whole["key"]) == ("a", "127.0.0.1", None)
    assert whole["seconds"] > 0
    assert whole["time"].endswith("+00:00")
    assert stream["status"] == 200
    assert stream["bytes"] >= streamed
    assert (missing["status"], missing["path"]) == (404, "/no%0Athing%22")
    assert "secret" not in log.text


async def test_a_client_that_disconnects_is_logged_too(engine: HeldEngine, log: Log) -> None:
    set_up("json")
    engine.go_on.clear()
    async with listening(create_app(engine)) as listener:
        _, writer = await connect(listener)
        writer.write(post_bytes("/v1/completions", HELLO))
        await until(lambda: engine.n_held == 1)
        writer.transport.abort()
        await until(log.entries)
    assert [entry["status"] for entry in log.entries()] == [499]


async def test_all_lines_of_a_request_carry_its_id_and_tracebacks_stay_in_theirs(
    http: Http, engine: HeldEngine, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_up("json")

    async def fail(_request: object) -> Any:
        raise ZeroDivisionError("a\nbug \udcff")
        yield

    monkeypatch.setattr(engine, "submit", fail)
    answers = [http.post("/v1/completions", json=HELLO, headers={"X-Request-Id": f"r{i}"}) for i in range(4)]
    assert {answer.status for answer in await asyncio.gather(*answers)} == {500}
    errors_logged = log.entries(api_errors.log.name)
    assert sorted(entry["request_id"] for entry in errors_logged) == ["r0", "r1", "r2", "r3"]
    assert all("ZeroDivisionError" in entry["traceback"] for entry in errors_logged)
    assert sorted(entry["request_id"] for entry in log.entries()) == ["r0", "r1", "r2", "r3"]


async def test_as_text_a_line_is_short_and_has_the_id(http: Http, log: Log) -> None:
    set_up("text")
    async with http.get("/v1/models", headers={"X-Request-Id": "mine"}):
        pass
    logging.getLogger("cppbatch.engine").info("not shown")
    logging.getLogger("cppbatch.engine").warning("shown")
    request, warning = log.text.splitlines()
    assert "INFO cppbatch.access: GET /v1/models 200, 0.0" in request
    assert request.endswith("127.0.0.1 [mine]")
    assert warning.endswith("WARNING cppbatch.engine: shown")


def test_a_message_cannot_forge_lines_or_control_the_terminal(log: Log) -> None:
    set_up("text")
    logging.getLogger("cppbatch.models").info("loaded %s", "\x1b[31m\r\n2026-01-01 INFO forged")
    first, second = log.text.splitlines()
    assert first.endswith(r"INFO cppbatch.models: loaded \x1b[31m\r")
    assert second == "    2026-01-01 INFO forged"


async def _poll_and_ask(http: Http) -> None:
    for path in ("/health", "/v1/health", "/ready", "/stats"):
        async with http.get(path) as answer:
            assert answer.status == 200


async def test_polls_of_the_health_are_logged_at_the_level_debug_only(http: Http, log: Log) -> None:
    set_up("json")
    await _poll_and_ask(http)
    assert [entry["path"] for entry in log.entries()] == ["/stats"]
    set_up("json", level="debug")
    await _poll_and_ask(http)
    assert [entry["path"] for entry in log.entries()][1:] == ["/health", "/v1/health", "/ready", "/stats"]


@pytest.mark.parametrize(
    ("level", "access", "shown"),
    [
        (None, True, ["cppbatch.access", "cppbatch.engine: two"]),
        (None, False, ["cppbatch.engine: two"]),
        ("info", True, ["cppbatch.access", "cppbatch.engine: one", "cppbatch.engine: two"]),
        ("warning", True, ["cppbatch.engine: two"]),
        ("error", True, []),
    ],
)
async def test_the_level_and_the_access_log_are_settings(
    level: Any, access: bool, shown: list[str], http: Http, log: Log
) -> None:
    set_up("text", level=level, access=access)
    await _poll_and_ask(http)
    logging.getLogger("cppbatch.engine").info("one")
    logging.getLogger("cppbatch.engine").warning("two")
    lines = [line for line in log.text.splitlines() if " cppbatch.access: " in line or " cppbatch.engine: " in line]
    assert len(lines) == len(shown)
    assert all(part in line for part, line in zip(shown, lines, strict=True))


async def test_bytes_that_are_not_http_are_one_line_that_does_not_quote_them(engine: HeldEngine, log: Log) -> None:
    set_up("json")
    async with listening(create_app(engine)) as listener:
        reader, writer = await connect(listener)
        writer.write(head("GET", "/health", "Authorization: Bearer " + "s3cret" * 2000))
        assert b" 400 " in await reader.readline()
        writer.close()
    (line,) = log.entries("aiohttp.server")
    assert line["level"] == "WARNING"
    assert "traceback" not in line
    assert "s3cret" not in log.text
