"""Models at an address: downloaded once, continued after an interruption, refused with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cppbatch.errors import ModelError
from cppbatch.models.pull import choose_model, projector_at
from cppbatch.models.url import pull_url, pull_url_file
from tests.support import tiny_models
from tests.support.file_site import Registry, Site


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


@pytest.mark.parametrize("knows_if_range", [True, False])
@pytest.mark.parametrize("n_more", [0, 512, -512])
def test_a_download_never_continues_with_another_file(model: bytes, knows_if_range: bool, n_more: int) -> None:
    other = bytearray(model + bytes(n_more) if n_more >= 0 else model[:n_more])
    other[900:1100] = bytes(200)
    with Site({"/m.gguf": model}).running() as site:
        site.cut = len(model) - 256
        with pytest.raises(ModelError, match=r"closed before the end"):
            pull_url_file(f"{site.url}/m.gguf")
        site.files["/m.gguf"], site.knows_if_range = bytes(other), knows_if_range
        assert pull_url_file(f"{site.url}/m.gguf").read_bytes() == other


def test_a_download_of_a_file_without_a_tag_starts_again(model: bytes) -> None:
    with Site({"/m.gguf": model}).running() as site:
        site.cut, site.tags = 1000, False
        with pytest.raises(ModelError, match=r"closed before the end"):
            pull_url(f"{site.url}/m.gguf")
        assert pull_url(f"{site.url}/m.gguf").read_bytes() == model
        assert [wanted for _, wanted in site.requests] == [None, None]


def test_a_download_that_ended_before_its_file_was_renamed_is_not_stuck(model: bytes, models_folder: Path) -> None:
    with Site({"/m.gguf": model}).running() as site:
        site.cut = 1000
        with pytest.raises(ModelError):
            pull_url(f"{site.url}/m.gguf")
        (part,) = models_folder.rglob("*.part")
        part.write_bytes(model)
        path = pull_url(f"{site.url}/m.gguf")
    assert path.read_bytes() == model
    assert [each.name for each in path.parent.iterdir()] == ["m.gguf"]


def test_two_models_of_one_file_are_downloaded_once(model: bytes) -> None:
    with Site({"/m.gguf": model}).running() as site, ThreadPoolExecutor(4) as threads:
        paths = [threads.submit(pull_url, f"{site.url}/m.gguf") for _ in range(4)]
        assert {path.result().read_bytes() for path in paths} == {model}
        assert len(site.requests) == 1


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


@pytest.fixture
def registry(model: bytes, monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry]:
    images = {"ai/smol:latest": [model], "ai/smol:135M-Q4_0": [model], "ai/smol:split": [model, b"b"], "ai/smol:no": []}
    found = Registry(images)
    with found.running() as url:
        monkeypatch.setenv("CPPBATCH_DOCKER_REGISTRY", f"{url}/")
        yield found


def test_a_model_of_a_registry_is_downloaded_once(registry: Registry, model: bytes, models_folder: Path) -> None:
    for name in ("docker://smol:135M-Q4_0", "docker://ai/smol:135M-Q4_0"):
        path = choose_model(name)
        assert path.read_bytes() == model
        assert path.relative_to(models_folder).parts[1:] == ("ai", "smol", "smol-135M-Q4_0.gguf")
    assert choose_model("docker://smol").name == "smol-latest.gguf"
    assert len(registry.blobs.requests) == 2
    assert len([each for each in registry.asked if each.startswith("/token")]) == 2


def test_a_token_of_a_registry_is_not_sent_to_the_host_of_its_files(registry: Registry) -> None:
    choose_model("docker://smol")
    assert registry.blobs.authorized == [None]


def test_a_registry_may_need_no_token(registry: Registry, model: bytes) -> None:
    registry.needs_token = False
    assert choose_model("docker://ai/smol").read_bytes() == model
    assert not any(each.startswith("/token") for each in registry.asked)


def test_a_file_of_a_registry_with_other_contents_is_refused(registry: Registry, model: bytes) -> None:
    name = next(iter(registry.blobs.files))
    registry.blobs.files[name] = model[:-1] + b"x"
    with pytest.raises(ModelError, match=r"has the SHA-256 .*, not .*; run the same command to download it again"):
        choose_model("docker://ai/smol")
    registry.blobs.files[name] = model
    assert choose_model("docker://ai/smol").read_bytes() == model


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("smol:none", r"ai/smol:none could not be read from http.*Not Found. Check the name and the network"),
        ("smol:split", "ai/smol:split has 2 GGUF files; only images with one can be used"),
        ("smol:no", "ai/smol:no has 0 GGUF files"),
        ("../smol", r"--docker-repo is '\.\./smol'; it must be \[REPO/\]MODEL\[:TAG\]"),
        ("Smol", "--docker-repo is 'Smol'"),
        ("smol:", "--docker-repo is 'smol:'"),
    ],
)
def test_what_is_not_a_model_of_a_registry_is_named(registry: Registry, name: str, problem: str) -> None:
    with pytest.raises(ModelError, match=problem):
        choose_model(f"docker://{name}")


def test_a_registry_that_cannot_be_reached_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPPBATCH_DOCKER_REGISTRY", "http://127.0.0.1:9")  # the discard port: nothing listens
    with pytest.raises(ModelError, match=r"ai/smol:latest could not be read from http://127\.0\.0\.1:9: .*refused"):
        choose_model("docker://smol")
