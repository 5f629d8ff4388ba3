"""Models at an address: downloaded once, continued after an interruption, refused with the reason."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from cppbatch.errors import ModelError
from cppbatch.models.pull import choose_model, projector_at
from cppbatch.models.url import pull_url
from tests.support import tiny_models
from tests.support.http_site import QuietHandler, serving


class Site:
    """Files by their paths. `cut`: bytes after which the next answer ends."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files, self.cut = files, -1
        self.requests: list[tuple[str, str | None]] = []
        self.url = ""

    @contextlib.contextmanager
    def running(self, *, ranges: bool = True) -> Iterator[Site]:
        site = self

        class Handler(QuietHandler):
            def do_GET(self) -> None:
                site.requests.append((self.path, wanted := self.headers.get("Range")))
                content = site.files.get(self.path.partition("?")[0])
                if content is None:
                    self.send_error(404)
                    return
                start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted and ranges else 0
                self.send_response(206 if start else 200)
                self.send_header("Content-Length", str(len(content) - start))
                self.end_headers()
                self.wfile.write(content[start : site.cut if site.cut >= 0 else None])
                site.cut = -1

        with serving(Handler) as self.url:
            yield self


@pytest.fixture
def model(tmp_path: Path) -> bytes:
    return tiny_models.llama(tmp_path / "tiny.gguf").read_bytes()


@pytest.fixture(autouse=True)
def models_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CPPBATCH_MODELS", str(tmp_path / "models"))
    return tmp_path / "models"


def test_a_model_is_downloaded_once_into_a_folder_of_its_host(model: bytes, models_folder: Path) -> None:
    with Site({"/a/m.gguf": model}).running() as site:
        path = choose_model(f"{site.url}/a/m.gguf?download=true")
        assert path.read_bytes() == model
        assert path.relative_to(models_folder).parts[1:] == ("a", "m.gguf")
        assert choose_model(f"{site.url}/a/m.gguf") == path
        assert len(site.requests) == 1
        assert not list(models_folder.rglob("*.part"))


@pytest.mark.parametrize("ranges", [True, False])
def test_an_interrupted_download_continues_where_the_site_can(model: bytes, ranges: bool) -> None:
    with Site({"/m.gguf": model}).running(ranges=ranges) as site:
        site.cut = 1000
        with pytest.raises(ModelError, match=r"closed before the end"):
            pull_url(f"{site.url}/m.gguf")
        assert pull_url(f"{site.url}/m.gguf").read_bytes() == model
        assert [wanted for _, wanted in site.requests] == [None, "bytes=1000-"]


def test_all_parts_of_a_split_model_are_downloaded(model: bytes) -> None:
    files = {f"/m-0000{i}-of-00002.gguf": model for i in (1, 2)}
    with Site(files).running() as site:
        path = pull_url(f"{site.url}/m-00001-of-00002.gguf?x=1")
    assert [path.name for path, _ in ((Path(p.partition("?")[0]), w) for p, w in site.requests)] == [
        "m-00001-of-00002.gguf",
        "m-00002-of-00002.gguf",
    ]
    assert path.with_name("m-00002-of-00002.gguf").is_file()


def test_a_projector_may_be_at_an_address(model: bytes) -> None:
    with Site({"/mmproj.gguf": model}).running() as site:
        assert projector_at(f"{site.url}/mmproj.gguf").read_bytes() == model


@pytest.mark.parametrize(
    "url",
    ["ftp://a.example/m.gguf", "http:///m.gguf", "https://a.example/", "https://a.example/m.bin", "https://a.example"],
)
def test_an_address_of_something_else_is_refused(url: str) -> None:
    with pytest.raises(ModelError, match="is not the http or https address of a GGUF file"):
        pull_url(url)


def test_a_path_never_leaves_the_models_folder(model: bytes, models_folder: Path) -> None:
    with Site({"/a/../../b/%2e%2e/m.gguf": model, "/a/..%2f..%2fm.gguf": model}).running() as site:
        path = pull_url(f"{site.url}/a/..%2f..%2fm.gguf")
    assert path.is_relative_to(models_folder)
    assert ".." not in path.parts


def test_a_file_that_is_not_there_or_not_a_model_is_named() -> None:
    with Site({"/m.gguf": b"<html>"}).running() as site:
        with pytest.raises(ModelError, match=r"/no\.gguf could not be downloaded: .*Not Found"):
            pull_url(f"{site.url}/no.gguf")
        with pytest.raises(ModelError, match=r"m\.gguf"):
            pull_url(f"{site.url}/m.gguf")
    with pytest.raises(ModelError, match="could not be downloaded"):
        pull_url(f"{site.url}/m.gguf2".replace("gguf2", "x.gguf"))
