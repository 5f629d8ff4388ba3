"""Clients of Ollama's API from npm: the official one, LangChain's and the Vercel AI SDK's provider."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.clients.serving import KEY, MODEL, Serving

HERE = Path(__file__).parent
PACKAGES = HERE / "package.json"
SCRIPT = HERE / "ollama_clients.mjs"


@pytest.fixture(scope="module")
def packages() -> Path:
    """A folder with the packages, installed once on this machine."""
    assert shutil.which("npm"), "these tests need Node 20 with npm"
    name = hashlib.sha256(PACKAGES.read_bytes()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    folder = cache / "cppbatch" / "clients" / f"node-{name}"  # as scripts/clients_environment.py
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            shutil.copy(PACKAGES, folder)
            subprocess.run(["npm", "install", "--no-audit", "--no-fund"], cwd=folder, check=True, timeout=300)
            (folder / "complete").touch()
    return folder


@pytest.mark.timeout(400)
def test_npm_clients_get_the_same_texts_streamed_and_whole(
    packages: Path, server: Serving, embedding_server: Serving
) -> None:
    shutil.copy(SCRIPT, packages)  # it imports packages from its folder
    given = {
        "OLLAMA_TEST_URL": server.url,
        "OLLAMA_TEST_EMBEDDINGS": embedding_server.url,
        "OLLAMA_TEST_MODEL": MODEL,
        "OLLAMA_TEST_KEY": KEY,
    }
    done = subprocess.run(
        ["node", SCRIPT.name], cwd=packages, env={**os.environ, **given}, capture_output=True, text=True,
        timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [answer["name"] for answer in answers] == ["official", "langchain", "vercel"]
    assert all("Paris" in answer["text"] for answer in answers)
