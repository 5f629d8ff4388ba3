"""Fetching images and audio: only from listed hosts, at listed or public addresses, and within size limits."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from cppbatch.chat.media_parts import MediaKind, MediaSource
from cppbatch.engine.media.sources import is_remote
from cppbatch.engine.model_info import ModelInfo
from cppbatch.engine.request import Media, MediaPrompt
from cppbatch.errors import ConfigError, InvalidRequest
from cppbatch.server.http.hosts import MediaDomains
from cppbatch.server.http.limits import Limits
from cppbatch.server.media_loading import MediaLoader, refuse_large
from cppbatch.server.remote_media import ByteBudget, fetch
from cppbatch.server.settings import ServerSettings
from tests.support.fakes import fake_engine
from tests.support.media_samples import RED, TONE, as_url

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


# --- the list ---------------------------------------------------------------------------------------------------------

LISTED = {
    "its name": ("example.org", "example.org", True),
    "in capitals": ("Example.ORG", "EXAMPLE.org.", True),
    "another name": ("example.org", "example.com", False),
    "a name that ends so": ("example.org", "badexample.org", False),
    "a subdomain": ("example.org", "cdn.example.org", False),
    "a subdomain, with *": ("*.example.org", "a.cdn.example.org", True),
    "the domain itself, with *": ("*.example.org", "example.org", False),
    "all": ("*", "anything.example", True),
    "all, and a public address": ("*", "93.184.215.14", True),
    "all, and a private address": ("*", "127.0.0.1", False),
    "all, and the address of cloud metadata": ("*", "169.254.169.254", False),
    "all, and IPv6's loopback": ("*", "[::1]", False),
    "all, and a private address in IPv6": ("*", "::ffff:10.0.0.1", False),
    "all, and a private address behind NAT64": ("*", "64:ff9b::a00:1", False),
    "all, and one behind a network's own NAT64": ("*", "64:ff9b:1::a00:1", False),
    "all, and an IPv4 address in IPv6": ("*", "::127.0.0.1", False),
    "all, and an address of a site": ("*", "fec0::1", False),
    "all, and a public address in IPv6": ("*", "2606:2800:21f:cb07:6820:80da:af6b:8b2c", True),
    "a public address that is not listed": ("example.org", "93.184.215.14", False),
    "its address": ("127.0.0.1", "127.0.0.1", True),
    "its address with a zone": ("fe80::1", "fe80::1%eth0", True),
    "its network": ("10.0.0.0/8", "10.9.8.7", True),
    "another network": ("10.0.0.0/8", "11.9.8.7", False),
    "nothing": ("", "example.org", False),
}  # fmt: skip


@pytest.mark.parametrize(("entry", "host", "listed"), LISTED.values(), ids=LISTED.keys())
def test_a_host_is_listed_by(entry: str, host: str, listed: bool) -> None:
    assert MediaDomains([entry] if entry else []).lists_host(host) is listed


@given(st.ip_addresses())
def test_no_private_address_is_connected_to_unless_it_is_listed(address: Any) -> None:
    if not address.is_global or address.is_multicast:
        assert not MediaDomains(["*"]).may_connect(str(address))
    assert MediaDomains([str(address)]).may_connect(str(address))


@pytest.mark.parametrize("entry", ["https://example.org", "example.org/cats", "10.0.0.0/99", "a b", "exa*mple.org"])
def test_an_entry_that_is_not_a_host_is_refused(entry: str) -> None:
    with pytest.raises(ConfigError, match="--allowed-media-domains"):
        ServerSettings(allowed_media_domains=(entry,))


# --- fetching ---------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[int]:
    """A server of another host, on 127.0.0.1: its port."""
    app = web.Application()
    app.router.add_get("/{path:.*}", handler)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


async def fetched(url: str, *domains: str, max_bytes: int = 1 << 20, seconds: float = 5) -> bytes:
    return await fetch("image", url, MediaDomains(domains), ByteBudget(max_bytes), seconds=seconds)


async def picture(_: web.Request) -> web.Response:
    return web.Response(body=RED)


async def refusal(url: str, *domains: str, **options: Any) -> str:
    with pytest.raises(InvalidRequest) as refused:
        await fetched(url, *domains, **options)
    assert refused.value.field == "image"
    return refused.value.message


async def test_an_image_of_a_listed_host_is_fetched() -> None:
    async with serving(picture) as port:
        assert await fetched(f"http://127.0.0.1:{port}/cat.png", "127.0.0.1") == RED


async def test_a_host_that_is_not_listed_is_not_contacted() -> None:
    asked = []

    async def note(request: web.Request) -> web.Response:
        asked.append(request.path)
        return web.Response(body=RED)

    async with serving(note) as port:
        for host in ("127.0.0.1", "localhost", "127.1", "2130706433", "0x7f000001", "[::ffff:127.0.0.1]"):
            message = await refusal(f"http://{host}:{port}/", "example.org")
            assert "--allowed-media-domains" in message or "could not be fetched" in message
        assert "not allowed" in await refusal(f"http://127.0.0.1:{port}/", "*")
    assert asked == []


async def test_a_listed_name_with_a_private_address_needs_the_address_too() -> None:
    async with serving(picture) as port:
        assert "private address" in await refusal(f"http://localhost:{port}/", "localhost")
        assert "private address" in await refusal(f"http://localhost:{port}/", "*")
        assert await fetched(f"http://localhost:{port}/", "localhost", "127.0.0.0/8") == RED


async def test_a_name_is_resolved_once_and_that_address_is_connected_to(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    async def resolve(_self: object, host: str, port: int = 0, family: int = 0) -> list[dict[str, Any]]:
        asked.append(host)  # another answer each time, as of a host that wants to be private for the second question
        address = "127.0.0.1" if len(asked) == 1 else "10.255.255.1"
        return [{"hostname": host, "host": address, "port": port, "family": socket.AF_INET, "proto": 0, "flags": 0}]

    monkeypatch.setattr(aiohttp.ThreadedResolver, "resolve", resolve)
    async with serving(picture) as port:
        assert await fetched(f"http://cats.example:{port}/", "cats.example", "127.0.0.1") == RED
    assert asked == ["cats.example"]


async def test_slow_lookups_leave_the_event_loops_threads_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()

    def slow(*_: object, **__: object) -> Any:
        go_on.wait(30)
        raise socket.gaierror(socket.EAI_NONAME, "no such name")

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    fetching = [asyncio.create_task(refusal(f"http://{i}.example/", "*")) for i in range(100)]
    await asyncio.sleep(0.1)
    assert await asyncio.wait_for(asyncio.to_thread(lambda: "free"), 10) == "free"
    go_on.set()
    assert all("could not be fetched" in message for message in await asyncio.gather(*fetching))


@pytest.mark.parametrize(
    "target", ["http://169.254.169.254/", "http://example.org/", "file:///etc/passwd", "ftp://127.0.0.1/", "gopher:x"]
)
async def test_a_redirect_leads_to_listed_hosts_only(target: str) -> None:
    async def redirect(_: web.Request) -> web.Response:
        return web.Response(status=302, headers={"Location": target})

    async with serving(redirect) as port:
        message = await refusal(f"http://127.0.0.1:{port}/", "127.0.0.1")
    assert "not allowed" in message or "only http and https URLs can be fetched" in message


async def test_a_redirect_to_a_listed_host_is_followed_a_few_times() -> None:
    async def redirect(request: web.Request) -> web.Response:
        n = int(request.path.strip("/"))
        return web.Response(body=RED) if n == 0 else web.Response(status=307, headers={"Location": f"/{n - 1}"})

    async with serving(redirect) as port:
        assert await fetched(f"http://127.0.0.1:{port}/3", "127.0.0.1") == RED
        assert "more than 3 redirects" in await refusal(f"http://127.0.0.1:{port}/4", "127.0.0.1")


async def test_more_bytes_than_allowed_are_not_read() -> None:
    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        if request.path == "/announced":
            response.content_length = 1 << 40
        await response.prepare(request)
        for _ in range(10_000):
            await response.write(b"x" * 65_536)
        return response

    async with serving(endless) as port:
        for path in ("", "announced"):
            assert "larger than 100,000 bytes" in await refusal(
                f"http://127.0.0.1:{port}/{path}", "127.0.0.1", max_bytes=100_000
            )


async def test_a_host_that_does_not_answer_is_not_waited_for() -> None:
    async def slow(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:  # a byte now and then
            await response.write(b"x")
            await asyncio.sleep(0.05)

    async with serving(slow) as port:
        message = await refusal(f"http://127.0.0.1:{port}/", "127.0.0.1", seconds=0.3)
    assert message == "could not be fetched within 0.3 s"


async def test_fetch_errors_name_the_reason() -> None:
    async def missing(_: web.Request) -> web.Response:
        return web.Response(status=404, text="secret page")

    async with serving(missing) as port:
        message = await refusal(f"http://127.0.0.1:{port}/", "127.0.0.1")
    assert message == "could not be fetched: 127.0.0.1 returned status 404"
    assert "user name" in await refusal(f"http://user:word@127.0.0.1:{port}/", "127.0.0.1")
    assert "could not be fetched" in await refusal(f"http://127.0.0.1:{port}/", "127.0.0.1")  # the server is closed
    assert "http" in await refusal("http://", "127.0.0.1")


@given(st.text(max_size=40))
def test_any_address_is_answered_or_refused(path: str) -> None:
    with pytest.raises(InvalidRequest):
        asyncio.run(fetched(f"http://{path}", "nowhere.invalid", seconds=1))


# --- the media of a request -------------------------------------------------------------------------------------------


def info(*modalities: MediaKind) -> ModelInfo:
    return msgspec.structs.replace(fake_engine().info, modalities=modalities)


BOTH = info("image", "audio")


def message(*urls: str, kind: MediaKind = "image") -> list[dict[str, Any]]:
    parts = [MediaSource(kind, f"messages[0].content[{i}]", url).part() for i, url in enumerate(urls)]
    return [{"role": "user", "content": parts}]


async def load(settings: ServerSettings, messages: list[dict[str, Any]], model: ModelInfo = BOTH) -> list[Media]:
    loader = MediaLoader(settings, model)
    await loader.fetch([messages])
    return [part["media"] for part in loader.load(messages)[0]["content"]]


async def test_an_address_that_occurs_twice_is_fetched_once() -> None:
    asked = []

    async def note(request: web.Request) -> web.Response:
        asked.append(request.path)
        return web.Response(body=TONE if request.path == "/b" else RED, content_type="text/html")

    async with serving(note) as port:
        settings = ServerSettings(allowed_media_domains=("127.0.0.1",))
        urls = [f"http://127.0.0.1:{port}/a"] * 3
        assert await load(settings, message(*urls)) == [Media("image", RED)] * 3
        with pytest.raises(InvalidRequest, match="is audio"):  # the bytes decide, whatever the header says
            await load(settings, message(f"http://127.0.0.1:{port}/b"))
    assert sorted(asked) == ["/a", "/b"]


async def test_a_model_without_a_projector_refuses_before_anything_is_fetched_or_decoded() -> None:
    asked = []

    async def note(request: web.Request) -> web.Response:
        asked.append(request.path)
        return web.Response(body=RED)

    async with serving(note) as port:
        settings = ServerSettings(allowed_media_domains=("127.0.0.1",))
        for url in (f"http://127.0.0.1:{port}/a", "data:;base64,*"):
            with pytest.raises(InvalidRequest, match="is loaded without a projector: start it with --mmproj FILE"):
                await load(settings, message(url), info())
        with pytest.raises(InvalidRequest, match=r"is audio, .* accepts only image and text input"):
            await load(settings, message("data:;base64,*", kind="audio"), info("image"))
    assert asked == []


async def test_a_tools_image_that_the_model_cannot_read_becomes_a_note_and_others_are_loaded() -> None:
    user, tool = message(as_url(RED))[0], {**message("http://127.0.0.1:9/image")[0], "role": "tool"}
    loader = MediaLoader(ServerSettings(), info())
    await loader.fetch([[tool]])
    note = {"type": "text", "text": "[image omitted: this model accepts only text input]"}
    assert loader.load([tool]) == [{"role": "tool", "content": [note]}]
    with pytest.raises(InvalidRequest, match="without a projector"):
        loader.load([tool, user])

    hears = MediaLoader(ServerSettings(), info("audio"))
    (answer,) = hears.load([{**message(as_url(TONE), kind="audio")[0], "role": "tool"}])
    assert answer["content"][0]["media"] == Media("audio", TONE)
    assert "accepts only audio and text input" in hears.load([tool])[0]["content"][0]["text"]


async def test_number_and_bytes_of_a_request_are_bounded() -> None:
    settings = ServerSettings(limits=Limits(max_media=2, max_media_mb=1))
    assert len(await load(settings, message(as_url(RED), as_url(RED)))) == 2
    with pytest.raises(InvalidRequest, match=r"content\[2\]: is one of 3 .*\(--max-media\)"):
        await load(settings, message(*[as_url(RED)] * 3))
    large = RED + b"\0" * (1 << 19)
    with pytest.raises(InvalidRequest, match=r"content\[1\]: makes .* larger than 1 MiB \(--max-media-mb\)"):
        await load(settings, message(as_url(large), as_url(large)))


async def test_files_and_fetched_ones_have_one_budget_for_all_conversations(tmp_path: Path) -> None:
    settings = ServerSettings(limits=Limits(max_media_mb=1), media_path=tmp_path)
    for name in "abc":
        (tmp_path / name).write_bytes(RED + b"\0" * (400 << 10))
    loader = MediaLoader(settings, BOTH)
    for name in "aab":  # a file that occurs twice counts once
        loader.load(message(f"file://{name}"))
    with pytest.raises(InvalidRequest, match="larger than 1,048,576 bytes"):
        loader.load(message("file://c"))


def test_each_completion_counts() -> None:
    prompt = MediaPrompt([Media("image", b"\0" * (1 << 18)), "x"])
    limits = Limits(max_media_mb=1)
    refuse_large([prompt], 4, limits)
    with pytest.raises(InvalidRequest, match="n: makes 5 completions"):
        refuse_large([prompt], 5, limits)
    with pytest.raises(InvalidRequest, match="prompts: makes 5 completions"):
        refuse_large([prompt] * 5, 1, limits)


async def test_files_of_the_server_are_read_from_one_folder(tmp_path: Path) -> None:
    folder = tmp_path / "media"
    folder.mkdir()
    (folder / "a cat.png").write_bytes(RED)
    (tmp_path / "secret.png").write_bytes(RED)
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    settings = ServerSettings(media_path=folder)
    for url in ("file://a%20cat.png", "FILE://a cat.png", f"file://{folder}/a%20cat.png"):
        assert await load(settings, message(url)) == [Media("image", RED)]
    for url in (
        "file://../secret.png", f"file://{tmp_path}/secret.png", "file://link.png", "file://", "file://none.png",
        "file:///etc/passwd", "file://a%00b", "FILE://..%2Fsecret.png",
    ):  # fmt: skip
        assert is_remote(next(iter(message(url)))["content"][0]["media"])
        with pytest.raises(InvalidRequest, match="file not found in the --media-path folder"):
            await load(settings, message(url))
    with pytest.raises(InvalidRequest, match="start the server with --media-path DIR"):
        await load(ServerSettings(), message("file://a%20cat.png"))
