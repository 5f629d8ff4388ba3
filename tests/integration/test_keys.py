"""API keys, and requests that are accepted without one."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from cppbatch import LocalEngine
from cppbatch.server.app import create_app
from cppbatch.server.auth.rules import Keys
from cppbatch.server.settings import ServerSettings
from tests.support.http_client import http_to
from tests.unit.test_keys import SECRETS

HELLO: dict[str, Any] = {"prompt": "Hello", "max_tokens": 2}


@pytest.fixture
async def http(engine: LocalEngine) -> AsyncIterator[TestClient[Any, Any]]:
    settings = ServerSettings(keys=Keys(SECRETS), cors_origins=("https://app.example",))
    async with http_to(engine, settings) as client:
        yield client


GOOD = [
    {"Authorization": "Bearer first-s3cret"},
    {"Authorization": "bearer  second-s3cret"},
    {"x-api-key": "second-s3cret"},
    {"Authorization": "Basic dTpw", "x-api-key": "first-s3cret"},
]

BAD = [
    {},
    {"Authorization": "Bearer wrong"},
    {"Authorization": "first-s3cret"},
    {"Authorization": "Bearer"},
    {"Authorization": "Bearer first-s3cre"},
    {"Authorization": "Bearer first-s3crets"},
    {"x-api-key": "\udcff\udcfe"},
    {"x-api-key": "é"},
]


@pytest.mark.parametrize("headers", GOOD)
async def test_any_of_the_keys_opens_in_either_header(http: TestClient[Any, Any], headers: dict[str, str]) -> None:
    async with http.post("/v1/completions", json=HELLO, headers=headers) as answer:
        assert answer.status == 200


@pytest.mark.parametrize("headers", BAD)
async def test_no_other_key_does(http: TestClient[Any, Any], headers: dict[str, str]) -> None:
    for path in ("/v1/completions", "/v1/models", "/stats", "/metrics", "/nothing"):
        async with http.post(path, json=HELLO, headers=headers) as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (401, "invalid_api_key")


async def test_health_and_ready_are_open(http: TestClient[Any, Any]) -> None:
    for path in ("/health", "/ready"):
        async with http.get(path) as answer:
            assert answer.status == 200


async def test_a_key_is_in_no_log_and_no_answer(http: TestClient[Any, Any], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    wrong = "wr0ng-key"
    said = ""
    for key in (*SECRETS, wrong):
        for path in ("/v1/completions", f"/v1/models?api_key={key}", "/metrics", "/nothing"):
            for headers in ({"Authorization": f"Bearer {key}"}, {"x-api-key": key}):
                async with http.get(path, headers=headers) as answer:
                    said += await answer.text() + str(answer.headers)
                async with http.post(path, data=b"{", headers=headers) as answer:
                    said += await answer.text() + str(answer.headers)
    ours = [record for record in caplog.records if record.name != "aiohttp.access"]  # the test server's own
    said += "".join(json.dumps(record.__dict__, default=str) for record in ours)
    rules = [Keys(SECRETS).rules_of(key) for key in SECRETS]
    assert all(each and each.name in said for each in rules)
    assert not [key for key in (*SECRETS, wrong) if key in said]


PREFLIGHT: dict[str, Any] = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}


async def test_a_page_of_a_named_origin_may_ask_with_a_key(http: TestClient[Any, Any]) -> None:
    origin: dict[str, Any] = {"Origin": "https://app.example"}
    async with http.options("/v1/completions", headers={**origin, **PREFLIGHT}) as answer:
        assert answer.status == 200
        assert answer.headers["Access-Control-Allow-Origin"] == "https://app.example"
        assert "authorization" in answer.headers["Access-Control-Allow-Headers"]
        assert answer.headers["Access-Control-Allow-Credentials"] == "true"
    key = {"Authorization": "Bearer first-s3cret"}
    bodies = [HELLO, {**HELLO, "stream": True}, {"prompt": 5}]
    for body, headers, status in [
        *((body, key, 400 if body["prompt"] == 5 else 200) for body in bodies),
        (HELLO, {}, 401),
    ]:
        async with http.post("/v1/completions", json=body, headers={**origin, **headers}) as answer:
            assert answer.status == status
            assert answer.headers["Access-Control-Allow-Origin"] == "https://app.example"
            assert "X-Request-Id" in answer.headers["Access-Control-Expose-Headers"]
            assert answer.headers["Vary"] == "Origin"


async def test_a_page_of_another_origin_may_not(http: TestClient[Any, Any]) -> None:
    origin: dict[str, Any] = {"Origin": "https://evil.example"}
    for method, path in (("OPTIONS", "/v1/completions"), ("GET", "/health"), ("POST", "/v1/completions")):
        async with http.request(method, path, headers={**origin, **PREFLIGHT}) as answer:
            assert "Access-Control-Allow-Origin" not in answer.headers


async def test_a_preflight_of_any_path_is_answered_without_a_key(http: TestClient[Any, Any]) -> None:
    routes = {route.resource.canonical for route in http.server.app.router.routes() if route.resource}  # type: ignore[attr-defined]
    assert "/v1/chat/completions" in routes
    for path in (*routes, "/nothing"):
        async with http.options(path, headers={"Origin": "https://app.example", **PREFLIGHT}) as answer:
            assert answer.status == 200
            assert answer.headers["Access-Control-Allow-Origin"] == "https://app.example"
            assert answer.headers["Access-Control-Allow-Methods"] == "GET, POST, DELETE, OPTIONS"


LOCAL = ("http://localhost", "http://localhost:8080", "http://127.0.0.1:3000", "https://[::1]:3000")
OTHERS = ("https://any.example", "http://notlocalhost", "http://localhost.evil.example", "null")


@pytest.mark.parametrize(
    ("origins", "keys", "allowed"),
    [
        (None, False, LOCAL),
        (None, True, LOCAL + OTHERS),
        (("localhost", "https://any.example"), True, (*LOCAL, "https://any.example")),
        (("*",), False, LOCAL + OTHERS),
        (("none",), True, ()),
    ],
    ids=["default", "default with keys", "named", "all", "none"],
)
async def test_pages_of_these_origins_may_use_the_server(
    engine: LocalEngine, origins: tuple[str, ...] | None, keys: bool, allowed: tuple[str, ...]
) -> None:
    app = create_app(engine, ServerSettings(cors_origins=origins, keys=Keys(SECRETS if keys else ())))
    async with TestClient(TestServer(app)) as http:
        for origin in LOCAL + OTHERS:
            async with http.get("/health", headers={"Origin": origin}) as answer:
                assert answer.headers.get("Access-Control-Allow-Origin") == (origin if origin in allowed else None)
