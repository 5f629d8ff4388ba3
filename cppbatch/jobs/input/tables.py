"""Reads prompts from a column of a CSV file."""

from __future__ import annotations

import csv
import re
from collections import deque
from collections.abc import Iterator

from cppbatch.errors import ConfigError
from cppbatch.jobs.input.format import MAX_LINE_BYTES, InputFormat, LineReader, describe_non_text, table_columns
from cppbatch.jobs.input.request_builder import LineError, RequestBuilder, check_text
from cppbatch.jobs.job_request import JobRequest, RejectedLine, hash64

_SEPARATOR_LINE = re.compile(r'"?sep=([^\s"\0]|\t)"?\s*', re.IGNORECASE)
"""The first line of some CSV files of Excel."""

_SAVE_AS = "save the file as UTF-8 with LF or CRLF line ends"


class CsvInput:
    """The requests of a CSV file. The first line names the columns."""

    def __init__(self, input_format: InputFormat, builder: RequestBuilder) -> None:
        self._format = input_format
        self._builder = builder
        self._lines = LineReader(input_format.path)
        self.columns: list[str] = []
        """The names of the columns; set when the first record is read."""

    def close(self) -> None:
        self._lines.close()

    def count(self) -> Iterator[int]:
        """Yields 1 for each entry that iterating yields."""
        return (1 for _ in self.records())

    def __iter__(self) -> Iterator[JobRequest | RejectedLine]:
        prompts: dict[str, int] = {}  # column indices by name
        ids: int | None = None
        for record in self.records():
            if isinstance(record, RejectedLine):
                yield record
                continue
            if not prompts:
                wanted = table_columns(self._format, self.columns)
                prompts = {name: self.columns.index(name) for name in wanted.prompt}
                ids = None if wanted.custom_id is None else self.columns.index(wanted.custom_id)
            line, row = record
            custom_id = None if ids is None else row[ids]
            yield self._builder.from_row(line, custom_id, {name: row[place] for name, place in prompts.items()})

    def ids(self) -> Iterator[tuple[int, str]]:
        """The line and the value of each row in the column `id`, if that names the results."""
        place: int | None = None
        for record in self.records():
            if place is None:
                if table_columns(self._format, self.columns).custom_id != "id":
                    return
                place = self.columns.index("id")
            if not isinstance(record, RejectedLine):
                yield record[0], record[1][place]

    def records(self) -> Iterator[tuple[int, list[str]] | RejectedLine]:
        """The line number and the fields of each record, or the reason for rejecting it. `columns` has the field names.

        Raises `ConfigError` if the table lacks its columns.
        """
        # csv's field limit (128 KiB by default) is global to the process. `_RecordReader` limits each record.
        csv.field_size_limit(max(csv.field_size_limit(), MAX_LINE_BYTES))
        records = _RecordReader(self._lines)
        delimiter = self._delimiter(records)
        rows = csv.reader(records, delimiter=delimiter, strict=True)
        columns = self.columns = self._columns(rows, records)
        table_columns(self._format, columns)  # raises for missing columns
        while True:
            records.begin_record()
            try:
                row = next(rows)
            except StopIteration:
                return
            except csv.Error as error:
                yield records.reject_unreadable(error)
                continue
            if records.is_blank(delimiter):
                continue
            if len(row) < len(columns):
                yield records.reject(f"has {len(row)} fields; the first line names {len(columns)} columns")
            elif any(row[len(columns) :]):
                more = f"has {len(row)} fields, more than the {len(columns)} columns named in the first line"
                yield records.reject(f"{more}: quote values that contain {rows.dialect.delimiter!r}")
            else:
                yield records.line, row[: len(columns)]

    def _delimiter(self, records: _RecordReader) -> str:
        first_line = records.peek_line()
        if named := _SEPARATOR_LINE.fullmatch(first_line):
            next(records)
            return named[1]
        if self._format.path.suffix.lower() == ".tsv":
            return "\t"
        return ";" if ";" in first_line and "," not in first_line else ","

    def _columns(self, rows: Iterator[list[str]], records: _RecordReader) -> list[str]:
        try:
            columns = [check_text(name.strip()) for name in next(rows, [])]
        except (csv.Error, LineError) as error:
            reason = f"{error}; {_SAVE_AS}" if isinstance(error, LineError) else records.describe(error)
            raise ConfigError(
                f"{self._format.path}: cannot read the column names in the first line: {reason}"
            ) from None
        if not columns:
            raise ConfigError(f"{self._format.path}: is empty; the first line must name the columns")
        return columns


class _RecordTooLong(csv.Error):
    """A record exceeds the maximum length of a line, or has too many lines."""


class _RecordReader:
    """Feeds lines to a `csv.reader`, and remembers the lines of the current record.

    An unclosed quote makes a record extend to the end of the file. Therefore only the first line of an unreadable
    record is rejected, and its other lines are read again. The number of bytes to read again is limited, because
    otherwise a crafted file could cause 16 MiB to be read again for each of its lines.
    """

    def __init__(self, lines: LineReader) -> None:
        self._lines = iter(lines)
        self._pushed_back: deque[tuple[int, bytes]] = deque()
        self._reread_bytes_left = 16 << 20
        self._record: list[tuple[int, bytes]] = []
        self._record_bytes = 0

    def __iter__(self) -> _RecordReader:
        return self

    def __next__(self) -> str:
        if self._pushed_back:
            number, line = self._pushed_back.popleft()
        else:
            number, line = next(self._lines)
            self._reread_bytes_left += 4 * len(line)
        self._record.append((number, line))
        self._record_bytes += len(line)
        # The number of lines is limited because short lines take far more memory than their bytes.
        if self._record_bytes > MAX_LINE_BYTES or len(self._record) > 1 << 18:
            raise _RecordTooLong
        return line.decode(errors="surrogateescape")

    def peek_line(self) -> str:
        """The first line that is not blank. Does not consume it."""
        for number, line in self._lines:
            if line.strip():
                self._pushed_back.append((number, line))
                return line.decode(errors="surrogateescape")
        return ""

    def begin_record(self) -> None:
        self._record = []
        self._record_bytes = 0

    @property
    def line(self) -> int:
        """The line number of the start of the record."""
        return self._record[0][0]

    def is_blank(self, delimiter: str) -> bool:
        """Whether the record is an empty line, or an empty row of a spreadsheet, which is only delimiters."""
        return len(self._record) == 1 and not self._record[0][1].strip(b" \t\r\n\v\f" + delimiter.encode())

    def describe(self, error: csv.Error) -> str:
        """Why the current record cannot be read."""
        if not any(cause in str(error) for cause in ("new-line character", "NUL")):  # NUL: Python 3.10
            return str(error)
        data = b"".join(line for _, line in self._record)
        is_text = b"\0" not in data  # bytes of UTF-16 look like line ends
        what = "a carriage return (CR) outside quotes is not a line end" if is_text else describe_non_text(data)
        return f"{what}; {_SAVE_AS}"

    def reject(self, message: str, code: str = "invalid_record") -> RejectedLine:
        data = b"".join(line for _, line in self._record)
        return RejectedLine(line=self.line, code=code, message=message, content_hash=hash64(data))

    def reject_unreadable(self, error: csv.Error) -> RejectedLine:
        """Rejects the record's first line, or all its lines if the limit of bytes to read again is exhausted."""
        (_, first), *others = self._record
        if others and self._record_bytes - len(first) <= self._reread_bytes_left:
            self._reread_bytes_left -= self._record_bytes - len(first)
            self._pushed_back.extendleft(reversed(others))
            del self._record[1:]
        is_too_long = isinstance(error, _RecordTooLong)
        if is_too_long and not others:
            return self.reject(f"is longer than {MAX_LINE_BYTES} bytes, the maximum line length", "line_too_long")
        is_open = is_too_long or "end of data" in str(error)
        problem = (
            "a quote that starts here is not closed" if is_open else f"cannot be read as CSV: {self.describe(error)}"
        )
        last = self._record[-1][0]
        return self.reject(problem if last == self.line else f"{problem}; skipping the lines up to {last}")
