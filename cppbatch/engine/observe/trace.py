"""A trace of every step, for Perfetto (ui.perfetto.dev) and chrome://tracing.

The format is Chrome's "JSON array format": one event per line. A file truncated by a crash is still readable.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from cppbatch.config import setting_name
from cppbatch.engine.sequence import Seq, SeqStatus
from cppbatch.errors import ConfigError
from cppbatch.regular_files import is_stream

log = logging.getLogger("cppbatch.engine")

TRACKS = {"device": 1, "steps": 2, "texts": 3}
"""llama.cpp's computations; the engine's work between them; text and events, which are created concurrently."""
_FIRST_SEQ = 100  # the track of seq_id 0


class Trace:
    """Writes spans on tracks: the phases of steps, and the sequences of each seq_id. Thread-safe."""

    def __init__(self, path: str) -> None:
        """Creates a file at `path`, or next to it if `path` exists. Raises `ConfigError` on failure."""
        self._file = _new_file(Path(path))
        self._lock = threading.Lock()
        self._open: dict[int, tuple[Seq, SeqStatus, float]] = {}  # by seq_id: sequence, status, start time
        self._named: set[int] = set()
        self._put(b"[\n")
        for name, track in TRACKS.items():
            self._name(track, name)
        log.warning("tracing every step to %s", self._file.name)

    def phase(self, name: str, start: float, end: float, about: dict[str, Any] | None = None) -> None:
        """Writes a phase of a step. Times are those of `perf_counter`."""
        track = "device" if name == "decode" else "texts" if name in ("text", "emit") else "steps"
        self._span(TRACKS[track], name, start, end, about)

    def follow(self, running: Iterable[Seq], now: float) -> None:
        """Compares the running sequences with the previous ones: a change of sequence or status in a seq_id ends a
        span."""
        present = {sequence.seq_id: sequence for sequence in running}
        for seq_id, (sequence, status, since) in list(self._open.items()):
            here = present.get(seq_id)
            if here is not sequence or here.status is not status:
                del self._open[seq_id]
                args = {"request": sequence.id, "prompt tokens": sequence.n_prompt, "generated": sequence.n_generated}
                self._span(_FIRST_SEQ + seq_id, status.value, since, now, args)
        for seq_id, sequence in present.items():
            if seq_id not in self._open:
                self._open[seq_id] = sequence, sequence.status, now
                if seq_id not in self._named:
                    self._named.add(seq_id)
                    self._name(_FIRST_SEQ + seq_id, f"seq_id {seq_id}")

    def count(self, now: float, **values: int) -> None:
        """Writes counters, each shown as a curve."""
        for name, value in values.items():
            self._write({"name": name, "ph": "C", "ts": now * 1e6, "pid": os.getpid(), "args": {name: value}})

    def flush(self) -> None:
        """Flushes buffered events when the engine is idle, because a server kills its workers."""
        with contextlib.suppress(OSError, ValueError), self._lock:  # the file was cut off or closed
            self._file.flush()

    def close(self) -> None:
        """Writes the end of the file."""
        self._put(b"{}]\n")
        with contextlib.suppress(OSError), self._lock:  # the disk is full: a truncated file is still readable
            self._file.close()

    def _span(self, track: int, name: str, start: float, end: float, args: dict[str, Any] | None = None) -> None:
        times = {"ts": start * 1e6, "dur": (end - start) * 1e6}
        self._write({"name": name, "ph": "X", **times, "pid": os.getpid(), "tid": track, "args": args or {}})

    def _name(self, track: int, name: str) -> None:
        about = {"ph": "M", "pid": os.getpid(), "tid": track}
        self._write({"name": "thread_name", **about, "args": {"name": name}})
        self._write({"name": "thread_sort_index", **about, "args": {"sort_index": track}})

    def _write(self, event: dict[str, Any]) -> None:
        self._put(msgspec.json.encode(event) + b",\n")

    def _put(self, line: bytes) -> None:
        """Appends a line. If that fails, the trace ends, but no request fails."""
        with self._lock:
            if self._file.closed:
                return
            try:
                self._file.write(line)
            except OSError as error:
                log.error("the trace %s is incomplete: %s", self._file.name, error.strerror)
                with contextlib.suppress(OSError):  # closing flushes
                    self._file.close()


def _new_file(path: Path) -> BinaryIO:
    """Creates a file. An existing one is never overwritten: it may be the trace of a worker that crashed. A device gets
    the trace."""
    for number in itertools.count(1):
        name = path if number == 1 else path.with_name(f"{path.stem}.{number}{path.suffix}")
        try:
            return name.open("wb" if is_stream(name) else "xb")
        except FileExistsError:
            continue
        except OSError as error:
            raise ConfigError(
                f"{setting_name('trace')}: {name} cannot be written: {error.strerror}. Choose another file"
            ) from error
    raise AssertionError
