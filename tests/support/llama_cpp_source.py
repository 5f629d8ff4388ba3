"""Parts of llama.cpp's sources, from the source package of the pinned llama-cpp-python. They are not in this repo.

They are fetched once per machine (76 MB), by pip, because it uses the user's index and proxies. It prepares the
package's metadata too, with build tools that it installs separately: most of the 45 seconds that it takes (7 if all is
in pip's cache).
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path, PurePosixPath

from platformdirs import user_cache_path

from cppbatch.llama.library import PINNED_VERSION

_TEMPLATES = PurePosixPath("models/templates")
_SERVER_TESTS = PurePosixPath("tools/server/tests")
_SERVER_README = PurePosixPath("tools/server/README.md")
_BINDING = PurePosixPath("llama-cpp-python")  # where its own files are put
_BINDING_TESTS = ("tests", "vendor/llama.cpp/models/ggml-vocab-llama-spm.gguf")


def chat_templates() -> dict[str, str]:
    """Chat templates of many models by the names of their files. Raises when they cannot be had."""
    return {file.stem: file.read_text("utf-8") for file in sorted((_fetched() / _TEMPLATES).glob("*.jinja"))}


def server_tests() -> Path:
    """The folder of llama-server's own tests, with the chat templates where they look for them.

    Raises when they cannot be had.
    """
    return _fetched() / _SERVER_TESTS


def server_readme() -> str:
    """The page of llama-server, with its flags. Raises when it cannot be had."""
    return (_fetched() / _SERVER_README).read_text("utf-8")


def binding_tests() -> Path:
    """The folder in which llama-cpp-python's own tests run: they are in `tests`, with the vocabulary where they look
    for it. Raises when they cannot be had."""
    return _fetched() / _BINDING


def _wanted(path: PurePosixPath) -> bool:
    """Of the files in llama.cpp's repository."""
    is_template = path.parent == _TEMPLATES and path.suffix == ".jinja"
    return is_template or _SERVER_TESTS in path.parents or path == _SERVER_README


def _fetched() -> Path:
    """A folder with the required files, laid out as in llama.cpp's repository."""
    folder = user_cache_path("cppbatch") / "sources" / f"llama-cpp-python-{PINNED_VERSION}-templates-tests-readme"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".fetch-") as work:
            part = Path(work) / "wanted"
            _unpack(_download(Path(work)), part)
            if not folder.is_dir():  # another run may have been faster
                part.rename(folder)
    return folder


def _download(folder: Path) -> Path:
    package = f"llama-cpp-python=={PINNED_VERSION}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*command, "--no-binary", "llama-cpp-python", "--dest", str(folder), package], check=True)
    return next(folder.glob("*.tar.gz"))


def _unpack(archive: Path, folder: Path) -> None:
    with tarfile.open(archive) as package:
        for member in package:
            own = member.name.partition("/")[2]
            _, _, inside = member.name.partition("/vendor/llama.cpp/")
            is_binding = own.startswith(_BINDING_TESTS)
            path = _BINDING / own if is_binding else PurePosixPath(inside)
            if member.isfile() and (is_binding or (inside and _wanted(path))):
                content = package.extractfile(member)
                assert content is not None
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / path).write_bytes(content.read())
    for part in (_TEMPLATES, _SERVER_TESTS, _SERVER_README, _BINDING):
        assert (folder / part).exists(), f"{archive.name} has no {part} of llama.cpp"
