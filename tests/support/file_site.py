"""Sites with files on 127.0.0.1: one that continues downloads, and a registry of container images."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator

from tests.support.http_site import QuietHandler, serving


class Site:
    """Files by their paths. `cut`: bytes after which the next answer ends."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files, self.cut = files, -1
        self.knows_if_range = True
        self.tags = True
        self.requests: list[tuple[str, str | None]] = []
        self.authorized: list[str | None] = []
        self.url = ""

    @contextlib.contextmanager
    def running(self, *, ranges: bool = True) -> Iterator[Site]:
        site = self

        class Handler(QuietHandler):
            def do_GET(self) -> None:
                site.requests.append((self.path, wanted := self.headers.get("Range")))
                site.authorized.append(self.headers.get("Authorization"))
                content = site.files.get(self.path.partition("?")[0])
                if content is None:
                    self.send_error(404)
                    return
                tag = f'"{hashlib.md5(content).hexdigest()}"'
                is_same = not site.knows_if_range or self.headers.get("If-Range") == tag
                start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted and ranges and is_same else 0
                if start >= len(content):
                    self.send_error(416)
                    return
                self.send_response(206 if start else 200)
                self.send_header("Content-Length", str(len(content) - start))
                if site.tags:
                    self.send_header("ETag", tag)
                if start:
                    self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
                self.end_headers()
                self.wfile.write(content[start : site.cut if site.cut >= 0 else None])
                site.cut = -1

        with serving(Handler) as self.url:
            yield self


class Registry:
    """Images by their names and tags, each with a GGUF file. Blobs are at another host, as CDNs are."""

    def __init__(self, images: dict[str, list[bytes]], *, needs_token: bool = True) -> None:
        self.images, self.needs_token = images, needs_token
        self.asked: list[str] = []
        self.blobs = Site({f"/{hashlib.sha256(each).hexdigest()}": each for files in images.values() for each in files})

    @contextlib.contextmanager
    def running(self) -> Iterator[str]:
        registry = self

        class Handler(QuietHandler):
            def do_GET(self) -> None:
                registry.asked.append(self.path)
                if self.path.startswith("/token?"):
                    assert "scope=repository%3Aai%2Fsmol%3Apull" in self.path
                    assert "service=here" in self.path
                    self._answer(200, {"token": "secret"})
                elif registry.needs_token and self.headers.get("Authorization") != "Bearer secret":
                    where = f'Bearer realm="{url}/token",service="here",scope="repository:ai/smol:pull"'
                    self._answer(401, {}, **{"WWW-Authenticate": where})
                elif self.path.startswith("/v2/ai/smol/blobs/sha256:"):
                    self._answer(307, {}, Location=f"{registry.blobs.url}/{self.path.rpartition(':')[2]}")
                elif (files := registry.images.get(self.path.removeprefix("/v2/").replace("/manifests/", ":"))) is None:
                    self._answer(404, {})
                else:
                    assert "application/vnd.oci.image.manifest.v1+json" in self.headers["Accept"]
                    kinds = ["application/vnd.docker.ai.gguf.v3"] * len(files) + ["application/vnd.docker.ai.license"]
                    digests = [f"sha256:{hashlib.sha256(each).hexdigest()}" for each in [*files, b""]]
                    layers = [{"mediaType": k, "digest": d} for k, d in zip(kinds, digests, strict=True)]
                    self._answer(200, {"schemaVersion": 2, "layers": layers})

            def _answer(self, status: int, content: object, **headers: str) -> None:
                body = json.dumps(content).encode()
                self.send_response(status)
                for name, value in {"Content-Length": str(len(body)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

        with self.blobs.running(), serving(Handler) as url:
            yield url
