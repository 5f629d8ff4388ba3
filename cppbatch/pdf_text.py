"""The text of PDF files, read by pypdf (the extra `pdf`).

A few bytes of a PDF can describe gigabytes, or take hours to read. A child process with a limit of time and memory
reads each file.
"""

from __future__ import annotations

import subprocess
import sys

from cppbatch.child_processes import child_command, run
from cppbatch.errors import UnreadableFile
from cppbatch.extras import require

PDF_HEADER = b"%PDF-"
MAX_PDF_BYTES = 64 << 20
_TIMEOUT_S = 60
_MEMORY_BYTES = 1 << 30
_TOO_MUCH, _UNREADABLE = 3, 4
"""Exit codes of the child."""


def pdf_text(data: bytes) -> str:
    """The text of all pages, with an empty line between two pages.

    Raises `UnreadableFile` without text, for a damaged or encrypted file, and for one that takes too much time or
    memory; `ConfigError` without pypdf.
    """
    require("pypdf", "a PDF file")
    if len(data) > MAX_PDF_BYTES:
        raise UnreadableFile(f"has {len(data) >> 20} MiB; the limit for a PDF is {MAX_PDF_BYTES >> 20} MiB")
    try:
        child = run(child_command(__file__), seconds=_TIMEOUT_S, stdin=data)
    except subprocess.TimeoutExpired:
        raise UnreadableFile(f"takes longer than {_TIMEOUT_S} seconds to read; split it") from None
    if child.returncode == _UNREADABLE:
        raise UnreadableFile(child.stdout.decode())
    if child.returncode:
        raise UnreadableFile(f"needs more than {_MEMORY_BYTES >> 30} GiB of memory to read; split it")
    text = child.stdout.decode()
    if not text.strip():
        raise UnreadableFile("contains no text, perhaps because its pages are images; run text recognition (OCR) first")
    return text


def _limit_memory() -> None:
    if sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))


def _read_pages(data: bytes) -> str:
    """Raises pypdf's errors, and what its parser raises for damaged files."""
    import io

    from pypdf import PdfReader

    pages, size = [], 0
    for page in PdfReader(io.BytesIO(data)).pages:
        pages.append(page.extract_text().strip())
        size += len(pages[-1])
        if size > 16 << 20:
            raise MemoryError
    return "\n\n".join(pages).strip()


def _main() -> None:
    import logging

    from pypdf.errors import DependencyError, FileNotDecryptedError

    logging.disable()  # pypdf's remarks about files that it can read
    _limit_memory()
    try:
        text, code = _read_pages(sys.stdin.buffer.read()), 0
    except (DependencyError, FileNotDecryptedError):
        text, code = "is encrypted; save a copy without its password", _UNREADABLE
    except MemoryError:
        text, code = "", _TOO_MUCH
    except Exception as error:  # a damaged file can raise anything
        text, code = f"is not a valid PDF: {' '.join(str(error).split())[:200] or type(error).__name__}", _UNREADABLE
    sys.stdout.buffer.write(text.encode(errors="replace"))
    sys.stdout.flush()
    sys.exit(code)


if __name__ == "__main__":
    _main()
