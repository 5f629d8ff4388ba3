"""Files that are one prompt each: those of a folder, of a zip file, or several that are named."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PureWindowsPath
from typing import IO, NamedTuple

from cppbatch.errors import ConfigError, UnreadableFile, name_first
from cppbatch.extras import require
from cppbatch.jobs.input.format import MAX_LINE_BYTES, InputFormat, is_unicode, unreadable_file
from cppbatch.jobs.input.request_builder import LineError, RequestBuilder, check_text
from cppbatch.jobs.job_request import JobRequest, RejectedLine, hash64
from cppbatch.pdf_text import MAX_PDF_BYTES, PDF_HEADER, pdf_text
from cppbatch.regular_files import open_regular

_MAX_ZIP_BYTES = 1 << 30
"""The limit for all files of a zip file together, unpacked."""
_MAX_FILES = 1 << 20


class Skipped(NamedTuple):
    """A file that is not read, and why."""

    name: str
    reason: str


class FileSet:
    """Files below a folder or in a zip file, by their names, which use / between folders."""

    def __init__(self, path: Path, content: IO[bytes] | None = None) -> None:
        """`path`: the folder, or the zip file. `content`: of the zip file; None: it is opened.

        Raises `ConfigError` if it cannot be read.
        """
        self.path = path
        self._file = content
        self._zip = self._open_zip(content) if content or not path.is_dir() else None

    def _open_zip(self, content: IO[bytes] | None) -> zipfile.ZipFile:
        try:
            self._file = content or open_regular(self.path)
            found = zipfile.ZipFile(self._file)
        except (OSError, ValueError) as error:
            raise unreadable_file(self.path, error) from None
        except zipfile.BadZipFile as error:
            self.close()
            raise ConfigError(f"{self.path}: is not a valid zip file: {error}") from None
        size = sum(each.file_size for each in found.infolist())
        if size > _MAX_ZIP_BYTES or len(found.infolist()) > _MAX_FILES:
            self._file.close()
            raise ConfigError(
                f"{self.path}: unpacks to {size >> 20} MiB in {len(found.infolist())} files; the limit is "
                f"{_MAX_ZIP_BYTES >> 20} MiB in {_MAX_FILES} files: unpack it and give the folder"
            )
        return found

    def names(self) -> Iterator[str]:
        """All files, in no particular order; hidden folders as one name."""
        if self._zip:
            yield from dict.fromkeys(each.filename for each in self._zip.infolist() if not each.is_dir())
            return
        for folder, folders, files in os.walk(self.path, onerror=self._raise):
            below = Path(folder).relative_to(self.path)
            hidden = [name for name in folders if _is_hidden(name)]
            folders[:] = [name for name in folders if name not in hidden]
            yield from ((below / name).as_posix() for name in (*files, *hidden))

    def _raise(self, error: OSError) -> None:
        raise unreadable_file(Path(error.filename), error)

    def is_regular(self, name: str) -> bool:
        """Whether this is an existing file, and not a device or a pipe."""
        return name in self._zip.NameToInfo if self._zip else os.path.isfile(self.path / name)

    def read(self, name: str, limit: int) -> bytes:
        """The first `limit` bytes of a file. Raises `UnreadableFile`."""
        try:
            with self._open(name) as file:
                return file.read(limit)
        except OSError as error:
            raise UnreadableFile(f"cannot be read: {error.strerror or error}") from None
        except RuntimeError:  # zipfile's for a missing password
            raise UnreadableFile("is encrypted; unpack the zip file and give the folder") from None
        except Exception as error:  # those of zipfile and of its decompressors share no class
            raise UnreadableFile(f"cannot be unpacked: {error}") from None

    def _open(self, name: str) -> IO[bytes]:
        return self._zip.open(name) if self._zip else open_regular(self.path / name)

    def close(self) -> None:
        """Closes the zip file."""
        if self._file:  # which `ZipFile.close` leaves open
            self._file.close()


def file_text(files: FileSet, name: str) -> tuple[str, int]:
    """The text of a file, and a hash of its name and content. A byte order mark is left out.

    Raises `UnreadableFile`.
    """
    start = files.read(name, len(PDF_HEADER))
    limit = MAX_PDF_BYTES if start == PDF_HEADER else MAX_LINE_BYTES
    data = files.read(name, limit + 1)
    if len(data) > limit:
        raise UnreadableFile(f"is longer than {limit >> 20} MiB, the limit for one prompt; split it")
    content_hash = hash64(name.encode(errors="surrogateescape") + b"\0" + data)
    if start == PDF_HEADER:
        return pdf_text(data), content_hash
    try:
        return data.decode("utf-8-sig"), content_hash
    except UnicodeDecodeError:
        raise UnreadableFile("is not UTF-8 text; save it as UTF-8") from None


def find_files(files: FileSet, names: Sequence[str] | None = None) -> tuple[list[str], list[Skipped]]:
    """The files to read, sorted by name, and those to skip: hidden ones, empty ones, and those that are not text.

    `names`: only these.
    """
    found, skipped = [], []
    for name in sorted(files.names() if names is None else names):
        try:
            why = _reason_to_skip(files, name)
        except UnreadableFile as error:
            why = str(error)
        if why:
            skipped.append(Skipped(name, why))
        else:
            found.append(name)
    return found, skipped


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") or part == "__MACOSX" for part in name.split("/"))


def _reason_to_skip(files: FileSet, name: str) -> str:
    """Why a file is not read; "" if it is. Raises `UnreadableFile`."""
    if _is_hidden(name):
        return "hidden"
    if PureWindowsPath(name).anchor or not is_unicode(name):  # an absolute path in a zip file, or with a drive
        return "its name is not a relative path in UTF-8"
    if not files.is_regular(name):
        return "not a regular file"
    start = files.read(name, 4096)  # to tell whether it is text
    if start.startswith(PDF_HEADER):
        try:
            require("pypdf", "a PDF file")
        except ConfigError as error:
            return str(error)
        return ""
    return "not text" if b"\0" in start else "empty" if not start.strip() else ""


_PROMPTS = (".zip", ".pdf", ".md")
"""The extensions of single files that are not lines of prompts."""
_LINES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".pq")
"""The extensions of files that are refused beside others: each would be one prompt."""


def are_prompts(paths: Sequence[Path]) -> bool:
    """Whether each file is one prompt: a folder, a zip file, a PDF, Markdown, or several files."""
    return len(paths) > 1 or os.path.isdir(paths[0]) or paths[0].suffix.lower() in _PROMPTS


def find_inputs(paths: Sequence[Path], say: Callable[[str], None]) -> tuple[Path, tuple[str, ...]]:
    """The folder or zip file of these `paths`, and the names of its files that are prompts. `say` gets those that are
    skipped.

    `paths`: a folder, a zip file, or files. Raises `ConfigError` if there is nothing to read.
    """
    (first, *others), names = paths, None
    folder = first
    if others or not (first.is_dir() or first.suffix.lower() == ".zip"):
        for path in paths:
            if path.is_dir() or path.suffix.lower() == ".zip":
                raise ConfigError(f"{path}: give one folder, one zip file, or several files")
            if path.suffix.lower() in _LINES:
                raise ConfigError(f"{path}: has a prompt in each line or row; give it alone, or a folder with it")
            if not path.exists():
                raise ConfigError(f"{path}: file not found")
        folder = Path(os.path.commonpath([os.path.abspath(path.parent) for path in paths]))
        names = list(dict.fromkeys(Path(os.path.abspath(path)).relative_to(folder).as_posix() for path in paths))
    files = FileSet(folder)
    try:
        found, skipped = find_files(files, names)
    finally:
        files.close()
    if skipped and found:
        say(skipped_line(skipped))
    if not found:
        raise ConfigError(f"{folder}: has no text files" + (f"; {skipped_line(skipped)}" if skipped else ""))
    return folder, tuple(found)


def skipped_line(skipped: Sequence[Skipped]) -> str:
    """The files that are skipped, in one sentence."""
    shown = name_first([f"{name} ({reason})" for name, reason in skipped], 8)
    return f"skipped {len(skipped)} file{'s' * (len(skipped) > 1)}: {shown}"


class FilesInput:
    """The requests of files: line N is the Nth file. Files that were removed since they were listed are left out."""

    def __init__(self, input_format: InputFormat, builder: RequestBuilder) -> None:
        self._names = input_format.files
        self._builder = builder
        self._files = FileSet(input_format.path)

    def __iter__(self) -> Iterator[JobRequest | RejectedLine]:
        for line, name in enumerate(self._names, start=1):
            if self._files.is_regular(name):
                yield self._request(line, name)

    def _request(self, line: int, name: str) -> JobRequest | RejectedLine:
        content_hash = hash64(name.encode())
        try:
            text, content_hash = file_text(self._files, name)
            return self._builder.from_file(line, name, check_text(text), content_hash)
        except UnreadableFile as error:
            code, message = "unreadable_file", f"{name}: {error}"
        except LineError as error:
            code, message = error.code, f"{name}: {error}"
        return RejectedLine(line=line, code=code, message=message, custom_id=name, content_hash=content_hash)

    def count(self) -> Iterator[int]:
        """The number of files."""
        return iter([len(self._names)])

    def ids(self) -> Iterator[tuple[int, str]]:
        """None: files are named by themselves."""
        return iter(())

    def close(self) -> None:
        """Closes the zip file."""
        self._files.close()
