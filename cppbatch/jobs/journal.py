"""A job's results on the disk: the files they go to, and the ledger that says what of them counts."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from cppbatch.jobs.durable_files import DurableFile
from cppbatch.jobs.job_request import JobRequest, RejectedLine
from cppbatch.jobs.ledger import FinishedLine, Ledger, LineState
from cppbatch.jobs.results import ResultLine, rejection_line

_AT_ONCE = 256  # held results that are written together
_TOKENS = ("prompt_tokens", "cached_tokens", "completion_tokens")


class Journal:
    """Every line of the input is answered or refused once, whatever happens in between.

    First a result is appended to its file, then the ledger says, in one commit, that the line is dealt with and how
    long the file is. What a dying process appended in between goes beyond that length and is cut off.

    For one thread at a time. Raises `StorageError`.
    """

    def __init__(self, ledger: Ledger, output: Path, errors: Path, *, ordered: bool = False) -> None:
        """Opens `output` for answers and `errors` for the rest; that file is made when there is a first one.

        `ordered`: answers in the order of the input's lines; the ledger holds those that are early.
        """
        self.ledger = ledger
        self._ordered = ordered
        self._errors_path = errors
        self._output = DurableFile(output, ledger.number("output_bytes"))
        try:
            self._errors = DurableFile(errors, ledger.number("error_bytes")) if errors.exists() else None
        except BaseException:
            self._output.close()
            raise
        self.tokens = Counter({name: ledger.number(name) for name in _TOKENS})

    @property
    def n_done(self) -> int:
        """Lines that were answered."""
        return self.ledger.n_done

    @property
    def n_failed(self) -> int:
        """Lines that were refused, or answered with an error."""
        return self.ledger.n_failed

    def register(self, entries: Sequence[JobRequest | RejectedLine]) -> list[JobRequest]:
        """Notes lines that follow each other, writes what is to be refused, and returns what is to be answered."""
        to_answer, to_refuse = self.ledger.register(entries)
        self.refuse(to_refuse)
        if self._ordered:
            self._write_ready()
        return to_answer

    def refuse(self, lines: Sequence[RejectedLine]) -> None:
        """Writes that these lines have no answer."""
        if lines:
            self.record([rejection_line(line) for line in lines])

    def record(self, results: Sequence[ResultLine]) -> None:
        """These are on the disk when this returns."""
        good = [result for result in results if result.is_good]
        bad = [result for result in results if not result.is_good]
        if bad and not self._errors:
            self._errors = DurableFile(self._errors_path, 0)
        numbers: dict[str, int] = {}
        tokens = sum((Counter(result.numbers) for result in results), Counter(self.tokens))
        with self._counted():
            if good and not self._ordered:
                self._output.append(b"".join(result.data for result in good))
                numbers["output_bytes"] = self._output.size
            if bad and self._errors:
                self._errors.append(b"".join(result.data for result in bad))
                numbers["error_bytes"] = self._errors.size
            self.ledger.record(
                [
                    FinishedLine(result.line, LineState.DONE if result.is_good else LineState.FAILED)
                    for result in results
                ],
                numbers | tokens,
                [(result.line, result.data) for result in good] if self._ordered else (),
            )
        self.tokens = tokens
        if self._ordered:
            self._write_ready()

    def _write_ready(self) -> None:
        while ready := self.ledger.ready(_AT_ONCE):
            with self._counted():
                self._output.append(b"".join(data for _, data in ready))
                self.ledger.let_go((line for line, _ in ready), {"output_bytes": self._output.size})

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        """What is appended in here counts only if the ledger could say so."""
        sizes = [(file, file.size) for file in (self._output, self._errors) if file]
        try:
            yield
        except BaseException:
            for file, size in sizes:
                file.size = size
            raise

    def close(self) -> None:
        """Closes all files."""
        with contextlib.closing(self.ledger), contextlib.closing(self._output):
            if self._errors:
                self._errors.close()
