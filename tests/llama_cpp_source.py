"""Chat templates of many models, out of the source package of the pinned llama-cpp-python. None is kept here."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path, PurePosixPath

from platformdirs import user_cache_path

from cppbatch.llama.library import PINNED_VERSION

_INSIDE = "vendor/llama.cpp/models/templates"


def chat_templates() -> dict[str, str]:
    """The templates by the names of their files, fetched once a machine (76 MB). Raises when they cannot be had.

    pip fetches them, since it knows the user's index and proxies. It prepares the package's metadata too, for which it
    installs build tools aside: most of the 45 seconds that it takes (7 when pip has it all in its cache).
    """
    folder = user_cache_path("cppbatch") / "sources" / f"llama-cpp-python-{PINNED_VERSION}-chat-templates"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".fetch-") as work:
            part = Path(work) / "templates"
            _unpack(_download(Path(work)), part)
            if not folder.is_dir():  # another run may have been faster
                part.rename(folder)
    return {file.stem: file.read_text("utf-8") for file in sorted(folder.glob("*.jinja"))}


def _download(folder: Path) -> Path:
    package = f"llama-cpp-python=={PINNED_VERSION}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*command, "--no-binary", "llama-cpp-python", "--dest", str(folder), package], check=True)
    return next(folder.glob("*.tar.gz"))


def _unpack(archive: Path, folder: Path) -> None:
    folder.mkdir()
    with tarfile.open(archive) as package:
        for member in package:
            path = PurePosixPath(member.name)
            if member.isfile() and path.suffix == ".jinja" and str(path.parent).endswith(_INSIDE):
                content = package.extractfile(member)
                assert content is not None
                (folder / path.name).write_bytes(content.read())
    assert any(folder.iterdir()), f"{archive.name} has no chat templates in {_INSIDE}"
