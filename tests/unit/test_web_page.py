"""The files of the web page: what is served, with which headers, and to which clients."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import AsyncIterator
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import ClientResponse
from aiohttp.test_utils import TestClient, TestServer
from yarl import URL

import cppbatch.server
from cppbatch.cluster.engines.client import Health
from cppbatch.server.app import create_app
from cppbatch.server.auth.rules import Keys
from cppbatch.server.settings import ServerSettings
from cppbatch.server.web_page import page_files

FOLDER = Path(cppbatch.server.__file__).with_name("page")
MEDIA_TYPES = {
    ".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml", ".woff2": "font/woff2",
}  # fmt: skip
SERVED = sorted(path for path in FOLDER.rglob("*") if path.suffix in MEDIA_TYPES)


class Loading:
    """An engine with a model that is still loading: the page is served without one."""

    def health(self) -> Health:
        return Health(status="loading", progress=0.5)

    async def workers(self) -> list[Any]:
        return []


async def client_of(settings: ServerSettings) -> TestClient[Any, Any]:
    client = TestClient(TestServer(create_app(Loading(), settings)))  # type: ignore[arg-type]
    await client.start_server()
    return client


@pytest_asyncio.fixture
async def client() -> AsyncIterator[TestClient[Any, Any]]:
    client = await client_of(ServerSettings(keys=Keys(["secret"])))
    yield client
    await client.close()


def policy_of(answer: ClientResponse) -> dict[str, str]:
    policy = answer.headers["Content-Security-Policy"]
    return {name: value for name, _, value in (part.strip().partition(" ") for part in policy.split(";"))}


async def test_every_file_is_served_with_its_media_type_while_the_model_loads_and_without_a_key(
    client: TestClient[Any, Any],
) -> None:
    assert len(SERVED) > 20
    for path in SERVED:
        answer = await client.get(f"/page/{path.relative_to(FOLDER).as_posix()}")
        assert answer.status == 200, path
        assert answer.content_type == MEDIA_TYPES[path.suffix]
        assert answer.charset == "utf-8"
        lines, source = (await answer.read()).split(b"\n"), path.read_bytes().split(b"\n")
        assert len(lines) == len(source), path
        left_out = [said.strip() for line, said in zip(lines, source, strict=True) if line != said]
        assert not left_out or (path.suffix == ".js" and path.parent.name not in ("vendor", "highlight")), path
        assert all(comment.startswith((b"//", b"/**", b"*")) for comment in left_out), "nothing but comments"


async def test_the_page_is_at_the_root(client: TestClient[Any, Any]) -> None:
    answer = await client.get("/")
    assert (answer.status, answer.content_type) == (200, "text/html")
    assert await answer.read() == (FOLDER / "index.html").read_bytes()


IMPORT = re.compile(r"""^(?:import|export)\s(?:[^'"]*?\sfrom\s)?['"](\.{1,2}/[^'"]+)['"]""", re.MULTILINE)


def imported_by(path: Path) -> set[Path]:
    """The module and all that it imports at once, directly or not."""
    found, waiting = set(), [path]
    while waiting:
        module = waiting.pop()
        if module not in found:
            found.add(module)
            waiting += [(module.parent / name).resolve() for name in IMPORT.findall(module.read_text())]
    return found


def test_the_page_loads_all_modules_of_its_first_view_at_once() -> None:
    """Otherwise each would be known only when the module that imports it has come."""
    index = (FOLDER / "index.html").read_text()
    preloaded = {FOLDER / name for name in re.findall(r'rel="modulepreload" href="page/([^"]+)"', index)}
    assert preloaded == imported_by(FOLDER / "app.js")


async def test_files_are_compressed_for_clients_that_accept_it(client: TestClient[Any, Any]) -> None:
    sizes = []
    for encoding in ("gzip, deflate, br", "identity"):
        answer = await client.get("/page/app.js", headers={"Accept-Encoding": encoding})
        assert await answer.read() == page_files()["app.js"].content
        assert answer.headers["Vary"] == "Accept-Encoding, Origin"
        sizes.append(int(answer.headers["Content-Length"]))
    assert sizes[0] < sizes[1] / 2


@pytest.mark.parametrize("path", ["/", "/page/app.js"])
async def test_the_browser_is_instructed_to_load_nothing_from_other_origins(
    client: TestClient[Any, Any], path: str
) -> None:
    answer = await client.get(path)
    policy = policy_of(answer)
    assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == policy["frame-ancestors"] == "'none'"
    assert policy["require-trusted-types-for"] == "'script'"
    assert policy["trusted-types"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert "unsafe" not in answer.headers["Content-Security-Policy"]
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert answer.headers["Referrer-Policy"] == "no-referrer"
    assert answer.headers["Cache-Control"] == "no-cache"


async def test_the_frame_for_diagrams_has_an_origin_of_its_own_one_script_and_nothing_to_load(
    client: TestClient[Any, Any],
) -> None:
    answer = await client.get("/page/diagram_frame.html")
    policy = policy_of(answer)
    assert policy["sandbox"] == "allow-scripts"
    assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert policy["frame-ancestors"] == "'self'"
    assert not {"img-src", "connect-src", "font-src", "frame-src"} & policy.keys()
    [script] = re.findall(r"<script>(.*?)</script>", await answer.text(), re.DOTALL)
    digest = b64encode(sha256(script.encode()).digest()).decode()
    assert policy["script-src"] == f"'sha256-{digest}' blob:"
    assert policy_of(await client.get("/"))["frame-src"] == "'self'"


@pytest.mark.parametrize("path", ["/", "/page/style.css"])
async def test_a_file_that_has_not_changed_is_not_sent_again(client: TestClient[Any, Any], path: str) -> None:
    first = await client.get(path)
    again = await client.get(path, headers={"If-None-Match": first.headers["ETag"]})
    assert (again.status, await again.read()) == (304, b"")
    assert again.headers["ETag"] == first.headers["ETag"]
    assert again.headers["Content-Security-Policy"] == first.headers["Content-Security-Policy"]
    assert (await client.get(path, headers={"If-None-Match": '"another"'})).status == 200


@pytest.mark.parametrize(
    "path",
    [
        "/page/../web_page.py", "/page/%2e%2e/web_page.py", "/page/..%2fweb_page.py", "/page//etc/passwd",
        "/page/chat/../../keys.py", "/page/..%5cweb_page.py", "/page/vendor/README.md", "/page/vendor", "/page/no.js",
    ],
)  # fmt: skip
async def test_other_files_are_not_served(client: TestClient[Any, Any], path: str) -> None:
    answer = await client.get(URL(path, encoded=True))
    assert answer.status in (401, 404), path  # 401: the path is not below /page/ any more
    assert "import" not in await answer.text()


async def test_the_api_requires_a_key_although_the_page_does_not(client: TestClient[Any, Any]) -> None:
    for path in ("/v1/models", "/props", "/stats", "/live", "/pages"):
        assert (await client.get(URL(path, encoded=True))).status == 401, path
    assert (await client.post("/")).status == 405


async def test_no_webui_serves_none_of_it() -> None:
    client = await client_of(ServerSettings(webui=False))
    assert (await client.get("/page/app.js")).status == 404
    answer = await client.get("/")  # where Ollama's clients look for a server
    assert (answer.status, await answer.text()) == (200, "cppbatch is running\n")
    await client.close()


class _Inline(HTMLParser):
    """Collects what the Content-Security-Policy would block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocked: list[str] = []
        self._script = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = dict(attrs)
        self.blocked += [f"{tag} {name}" for name in names if name == "style" or name.startswith("on")]
        if tag == "style" or (tag == "script" and "src" not in names):
            self.blocked.append(tag)


def test_the_page_has_no_inline_script_or_style() -> None:
    parser = _Inline()
    parser.feed((FOLDER / "index.html").read_text())
    assert parser.blocked == []


def test_the_page_never_puts_a_key_into_an_address() -> None:
    for path in SERVED:
        if "vendor" not in path.parts:
            assert not re.search(r"[?&](api_?key|key|token)=", path.read_text(), re.IGNORECASE), path


def test_every_import_of_the_page_is_a_file_of_it() -> None:
    n_imports = 0
    for path in SERVED:
        if path.suffix != ".js" or "vendor" in path.parts:
            continue
        for target in re.findall(r"(?:from|import|import\() ?'(\.[^'$]+)'", path.read_text()):
            n_imports += 1
            assert (path.parent / target).resolve().relative_to(FOLDER).as_posix() in page_files(), (path, target)
    assert n_imports > 5


def test_the_libraries_are_the_files_of_their_packages() -> None:
    rows = re.findall(
        r"^\| (\S+\.(?:js|css|woff2)) \|.*\(LICENSE\.(\w+)\) \| (\w{64}) \|$",
        (FOLDER / "vendor/README.md").read_text(),
        re.M,
    )
    files = {
        path.relative_to(FOLDER / "vendor").as_posix()
        for path in (FOLDER / "vendor").rglob("*.*")
        if path.suffix in MEDIA_TYPES
    }
    assert {name for name, _, _ in rows} == files
    for name, licence, digest in rows:
        assert sha256((FOLDER / "vendor" / name).read_bytes()).hexdigest() == digest, name
        assert (FOLDER / "vendor" / f"LICENSE.{licence}").stat().st_size > 500
