"""Prompts in a column of a CSV file."""

from __future__ import annotations

import csv
from collections import deque
from collections.abc import Iterator

from cppbatch.errors import ConfigError
from cppbatch.jobs.hashing import hash64
from cppbatch.jobs.input_format import InputFormat, table_columns
from cppbatch.jobs.job_request import JobRequest, RejectedLine
from cppbatch.jobs.line_reader import MAX_LINE_BYTES, LineReader
from cppbatch.jobs.request_builder import LineError, RequestBuilder, check_text

_REREAD_AT_FIRST = 16 << 20
_REREAD_PER_BYTE = 4
_MOST_LINES = 1 << 18
"""Of a record, since short lines take far more memory than they have bytes."""


class CsvInput:
    """The items of a CSV file, whose first line names the columns."""

    def __init__(self, form: InputFormat, requests: RequestBuilder) -> None:
        self._form = form
        self._requests = requests
        self._lines = LineReader(form.path)

    @property
    def fraction(self) -> float:
        return self._lines.fraction

    def close(self) -> None:
        self._lines.close()

    def __iter__(self) -> Iterator[JobRequest | RejectedLine]:
        # The limit, of 128 KiB by default, is one for the whole process; what we read is limited by _Feed.
        csv.field_size_limit(max(csv.field_size_limit(), MAX_LINE_BYTES))
        feed = _Feed(self._lines)
        rows = csv.reader(feed, delimiter=self._delimiter(feed.first_line()), strict=True)
        columns = self._columns(rows)
        prompt, *naming = map(columns.index, table_columns(self._form, columns))
        while True:
            feed.begin_record()
            try:
                row = next(rows)
            except StopIteration:
                return
            except csv.Error as error:
                yield feed.give_up(error)
                continue
            if feed.is_blank:
                continue
            if len(row) < len(columns):
                yield feed.refused(f"has {len(row)} of the {len(columns)} fields that the first line names")
            elif any(row[len(columns) :]):
                more = f"has {len(row)} fields, more than the {len(columns)} that the first line names"
                yield feed.refused(f"{more}: a text with {rows.dialect.delimiter!r} in it must be in quotes")
            else:
                yield self._requests.item(feed.line, row[naming[0]] if naming else None, row[prompt])

    def _delimiter(self, first_line: str) -> str:
        if self._form.path.suffix.lower() == ".tsv":
            return "\t"
        return ";" if ";" in first_line and "," not in first_line else ","

    def _columns(self, rows: Iterator[list[str]]) -> list[str]:
        try:
            columns = [check_text(name.strip()) for name in next(rows, [])]
        except (csv.Error, LineError) as error:
            raise ConfigError(f"{self._form.path}: its first line should name the columns, but: {error}") from None
        if not columns:
            raise ConfigError(f"{self._form.path}: is empty, and its first line should name the columns")
        return columns


class _TooLong(csv.Error):
    """A record is longer than a line may be, or has too many lines."""


class _Feed:
    """The lines that a csv.reader reads, and which of them make up the record that it reads just now.

    A quote that is never closed takes in all lines up to the file's end, so of a record that cannot be read only the
    first line is given up, and the others are read again; as long as that is not too often, since a file can be made
    in which each line would have 16 MiB read again.
    """

    def __init__(self, lines: LineReader) -> None:
        self._fresh = iter(lines)
        self._again: deque[tuple[int, bytes]] = deque()
        self._may_reread = _REREAD_AT_FIRST
        self._record: list[tuple[int, bytes]] = []
        self._record_size = 0

    def __iter__(self) -> _Feed:
        return self

    def __next__(self) -> str:
        if self._again:
            number, line = self._again.popleft()
        else:
            number, line = next(self._fresh)
            self._may_reread += _REREAD_PER_BYTE * len(line)
        self._record.append((number, line))
        self._record_size += len(line)
        if self._record_size > MAX_LINE_BYTES or len(self._record) > _MOST_LINES:
            raise _TooLong
        return line.decode(errors="surrogateescape")

    def first_line(self) -> str:
        """The first that is not blank; it is still to be read."""
        for number, line in self._fresh:
            if line.strip():
                self._again.append((number, line))
                return line.decode(errors="surrogateescape")
        return ""

    def begin_record(self) -> None:
        self._record = []
        self._record_size = 0

    @property
    def line(self) -> int:
        """Where the record begins."""
        return self._record[0][0]

    @property
    def is_blank(self) -> bool:
        return len(self._record) == 1 and self._record[0][1].isspace()

    def refused(self, message: str, code: str = "invalid_record") -> RejectedLine:
        data = b"".join(line for _, line in self._record)
        return RejectedLine(line=self.line, code=code, message=message, content=hash64(data))

    def give_up(self, error: csv.Error) -> RejectedLine:
        """Refuses the record's first line, or all its lines if reading the others again would cost too much."""
        (_, first), *others = self._record
        if others and self._record_size - len(first) <= self._may_reread:
            self._may_reread -= self._record_size - len(first)
            self._again.extendleft(reversed(others))
            del self._record[1:]
        is_too_long = isinstance(error, _TooLong)
        if is_too_long and not others:
            return self.refused(f"is longer than {MAX_LINE_BYTES} bytes, the most a line may have", "line_too_long")
        is_open = is_too_long or "end of data" in str(error)
        problem = "a quote that begins here is not closed" if is_open else f"cannot be read as CSV: {error}"
        last = self._record[-1][0]
        return self.refused(problem if last == self.line else f"{problem}; nothing is read of the lines up to {last}")
