"""Cached prefixes on disk: decides which to write and when, and which to read, and runs the threads that do it.

The engine's thread decides and copies states; it never waits for the disk. One thread writes, one reads. At most one
prefix is being written: meanwhile others stay where they are, and are written if they still exist later. Until the
digests of the weights are known, which may take a minute with a new file, nothing is read or written.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

from cppbatch.engine.disk.folder import PrefixFolder
from cppbatch.engine.disk.prefix_index import DiskPrefix, PrefixIndex
from cppbatch.engine.disk.slots import Footer, StateKey
from cppbatch.engine.kv.cached_prefix import CachedPrefix, Salt
from cppbatch.engine.kv.prefix_tier import TierCounts, TierLimits
from cppbatch.engine.kv.radix_tree import Tokens
from cppbatch.engine.kv.save_cost import DiskCost
from cppbatch.engine.sequence import DiskRead, SavedState, Seq
from cppbatch.errors import CppBatchError, ModelError

log = logging.getLogger("cppbatch.engine")

_MIN_TOKENS = 256  # minimum gain of a file over those on disk, or of a read over memory; fewer are computed as fast
_MIN_NEW_PART = 0.25  # minimum fraction of a file's tokens that are new; so a conversation of n tokens writes up to 5 n
_BUSY_SHARE = 0.005  # fraction of the time that copying and writing states may take while requests run
_MAX_SAVED_UP_S = 0.1  # maximum unused part of that time
_IDLE_S = 0.1  # idle time after which writing does not count as concurrent with requests
_MAX_CANDIDATES = 512
_TOUCH_EVERY_S = 10.0
_RETRY_WRITING_S = 60.0  # without writing, after a file could not be written


class _Read:
    """A read for one or several sequences."""

    __slots__ = ("data", "done", "gains", "prefix", "salt", "seconds")

    def __init__(self, prefix: DiskPrefix, salt: Salt) -> None:
        self.prefix = prefix
        self.salt = salt
        self.done = False
        self.gains: list[int] = []  # tokens that each sequence does not need to compute
        self.data: tuple[Tokens, npt.NDArray[np.uint8], Footer] | None = None  # set by the reading thread
        self.seconds = 0.0


class _NoRead:
    done = True


_NO_READ: DiskRead = _NoRead()

StateOf = Callable[[CachedPrefix], SavedState | None]
"""Returns the state of a cached prefix; None if it is no longer cached, or memory for a copy runs out."""
AddCached = Callable[[Tokens, Salt, npt.NDArray[np.uint8], Mapping[str, Any]], None]
"""Adds a prefix to the cache in host memory: tokens, salt, data and form of its state. Raises `TypeError` or
`CppBatchError` for a state that this version cannot read."""


class DiskPrefixes:
    """The prefixes on disk of an engine: a `PrefixTier`.

    All methods are for the engine's thread, except `refresh`. Methods that need a state, or have one to add, get the
    function for it.
    """

    def __init__(
        self,
        folder: PrefixFolder,
        key: StateKey,
        token_s: Callable[[], float],
        *,
        min_tokens: int = _MIN_TOKENS,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        """`token_s`: returns the current seconds per prompt token. `min_tokens`: prefixes that save fewer tokens are
        neither written nor read."""
        self._limits = TierLimits()
        self._folder = folder
        self._files = key.files
        self._files.read_beside()
        self._clock = clock
        self._cost = DiskCost(token_s)
        self._min_tokens = min_tokens
        self._index = PrefixIndex(folder, key)
        self.counts = TierCounts(entries=len(self._index))
        # In order of arrival.
        self._candidates: dict[CachedPrefix, None] = {}
        # Most of their tokens are on disk already: the rest is written at the end.
        self._rests: dict[CachedPrefix, None] = {}
        self._touched: dict[str, float] = {}  # when a file's time was last set
        self._token_bytes = 0.0
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="cppbatch-disk-writer")
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="cppbatch-disk-reader")
        self._writing: Future[None] | None = None
        self._paused_until = 0.0
        self._has_failed = False
        self._lock = threading.Lock()  # for `_left_s`, which the writing thread changes too
        self._left_s = _MAX_SAVED_UP_S  # remaining time that writing may take while requests run
        self._counted_at = self._worked_at = clock()
        self._reads: dict[str, _Read] = {}  # by file name, until their result is in the cache
        self._n_reading = 0  # bytes of these files
        self._read_now: deque[_Read] = deque()  # by the reading thread
        self._arrived = threading.Event()

    # --- reading ------------------------------------------------------------------------------------------------

    def set_limits(self, limits: TierLimits) -> None:
        """Sets which prefixes can be used from now on."""
        self._limits = limits

    def refresh(self) -> None:
        """Looks for files of other processes. For a thread that prepares a request; usually a single system call."""
        self.counts.damaged += self._index.refresh()
        self.counts.entries = len(self._index)

    def is_coming(self, sequence: Seq, n: int) -> bool:
        """Whether a prefix of more than `n` tokens is being read for a waiting sequence, so that it keeps waiting.

        Starts the read when called for a sequence for the first time.
        """
        if sequence.disk_read is None:
            sequence.disk_read = self._start_read(sequence, n)
        return not sequence.disk_read.done

    def _start_read(self, sequence: Seq, n: int) -> DiskRead:
        tokens, limits = sequence.tokens[: sequence.n_tokens - 1], self._limits
        if len(tokens) - n < self._min_tokens:
            return _NO_READ
        found = self._index.best(tokens, sequence.salt, limits)
        if found is None:
            return _NO_READ
        prefix, n_found = found
        read = self._reads.get(prefix.name)
        if n_found - n < self._min_tokens:
            return _NO_READ
        if read is None:
            has_room = self._n_reading + prefix.n_bytes <= limits.n_bytes
            if not (has_room and self._cost.is_worth(n_found - n, prefix.n_bytes)):
                return _NO_READ
            read = self._reads[prefix.name] = _Read(prefix, sequence.salt)
            self._n_reading += prefix.n_bytes
            self._reader.submit(self._read, read)
        read.gains.append(n_found - n)
        return read

    def _read(self, read: _Read) -> None:
        """Runs on the reading thread."""
        began = perf_counter()
        try:
            tokens, state, footer = self._folder.read(read.prefix.name)
            self._files.check()
            if not self._index.is_ours(footer, read.salt) or not np.array_equal(tokens, read.prefix.tokens):
                raise ValueError("it belongs to a different prefix")
            read.data = tokens, state, footer
        except (OSError, MemoryError, ModelError) as error:  # deleted by another process, or not readable
            log.debug("not reading %s: %s", read.prefix.name, error)
        except ValueError as error:
            log.warning("deleted %s: it is damaged (%s)", self._folder.folder / read.prefix.name, error)
            self._folder.remove(read.prefix.name)
            self.counts.damaged += 1
        except Exception:
            log.exception("failed to read a cached prefix")
        read.seconds = perf_counter() - began
        self._read_now.append(read)
        self._arrived.set()

    def collect(self, add: AddCached) -> None:
        """Adds the read prefixes to the cache, and lets the waiting sequences continue."""
        self._arrived.clear()
        while self._read_now:
            read = self._read_now.popleft()
            name, n_bytes = read.prefix.name, read.prefix.n_bytes
            del self._reads[name]
            self._n_reading -= n_bytes
            read.done = True
            if read.data and self._add(*read.data, read.salt, add):
                self._cost.observe_read(n_bytes, read.seconds)
                self.counts.hits += len(read.gains)
                self.counts.hit_tokens += sum(read.gains)
                self.counts.read_bytes += n_bytes
            else:
                self._index.discard(name)
            self.counts.entries = len(self._index)
            read.data = None

    @staticmethod
    def _add(tokens: Tokens, data: npt.NDArray[np.uint8], footer: Footer, salt: Salt, add: AddCached) -> bool:
        try:
            add(tokens, salt, data, footer.form)
        except (TypeError, CppBatchError) as error:  # another version of this program wrote it
            log.warning("cannot use a cached prefix on disk: %s", error)
            return False
        return True

    def wait(self, seconds: float) -> None:
        """Waits up to this long for a pending read, if any, because the engine has no other work."""
        if self._reads:
            self._arrived.wait(seconds)

    # --- writing ------------------------------------------------------------------------------------------------

    def kept(self, cached: CachedPrefix) -> None:
        """Called when a finished sequence has left this prefix in the cache."""
        n, n_new = len(cached.tokens), self._n_new(cached)
        if n_new < self._min_tokens or not self._cost.is_worth(n_new, self._n_bytes(n)):
            return
        candidates = self._candidates if n_new >= _MIN_NEW_PART * n else self._rests
        candidates[cached] = None
        if len(candidates) > _MAX_CANDIDATES:
            for each in list(candidates):
                if each.is_dropped:
                    del candidates[each]
            if len(candidates) > _MAX_CANDIDATES:
                del candidates[next(iter(candidates))]

    def dropped(self, cached: CachedPrefix, state: SavedState) -> None:
        """Called before this prefix is dropped from host memory: the last chance to write its state."""
        is_candidate = cached in self._candidates or cached in self._rests
        self._candidates.pop(cached, None)
        self._rests.pop(cached, None)
        if is_candidate and self._may_write() and self._has_time_left():
            self._try_write(cached, lambda _: state, is_beside=True)

    def after_step(self, state_of: StateOf) -> None:
        """Writes a prefix while requests run, if the time budget allows."""
        self._worked_at = self._clock()
        if self._candidates and self._may_write() and self._has_time_left():
            self._write_next(state_of, is_beside=True)

    def idle(self, state_of: StateOf) -> float:
        """Writes a prefix while there are no requests. Returns the seconds until the next call.

        Not immediately after the last request, since the next one often follows.
        """
        if not self._candidates or self._clock() < self._paused_until:
            return 1.0
        if self._clock() >= self._worked_at + _IDLE_S and self._may_write():
            self._write_next(state_of, is_beside=False)
        return _IDLE_S / 2

    def write_rest(self, seconds: float, state_of: StateOf) -> None:
        """Writes all remaining worthwhile prefixes, within a time limit: the engine is closing, or may never run
        again."""
        until = self._clock() + seconds
        if self._candidates or self._rests:
            self._files.wait(seconds)
        self._candidates |= self._rests
        self._rests = {}
        while self._wait_for_writer(until - self._clock()) and self._may_write():
            if not self._write_next(state_of, is_beside=False, is_last=True):
                break

    def _wait_for_writer(self, seconds: float) -> bool:
        """Waits up to this many seconds until the writing thread is idle. Returns whether it is."""
        if self._writing:
            wait([self._writing], max(0.0, seconds))
        return seconds > 0 and self._is_free()

    def _is_free(self) -> bool:
        return self._writing is None or self._writing.done()

    def _may_write(self) -> bool:
        return self._is_free() and self._clock() >= self._paused_until and self._files.are_known

    def _has_time_left(self) -> bool:
        """Whether writing has taken less than its share of the time."""
        now = self._clock()
        with self._lock:
            self._left_s = min(_MAX_SAVED_UP_S, self._left_s + _BUSY_SHARE * (now - self._counted_at))
            self._counted_at = now
            return self._left_s > 0

    def _write_next(self, state_of: StateOf, *, is_beside: bool, is_last: bool = False) -> bool:
        """Starts writing a prefix, preferring one that has been reused. False if there is none."""
        while self._candidates:
            cached = next((each for each in self._candidates if each.was_reused), next(iter(self._candidates)))
            del self._candidates[cached]
            if not is_last and self._n_new(cached) < _MIN_NEW_PART * len(cached.tokens):
                self._rests[cached] = None  # most of it has been written meanwhile
            elif self._try_write(cached, state_of, is_beside=is_beside):
                return True
        return False

    def _try_write(self, cached: CachedPrefix, state_of: StateOf, *, is_beside: bool) -> bool:
        """Starts writing a prefix, if it is cached and still worth it. `is_beside`: requests are running."""
        n_new = self._n_new(cached)
        if n_new < self._min_tokens:
            return False
        began = self._clock()
        state = state_of(cached)
        if state is None:
            return False
        if is_beside:
            self._charge(self._clock() - began)
        self._token_bytes = state.n_bytes / len(cached.tokens)
        if not self._cost.is_worth(n_new, state.n_bytes):
            return False
        write, removes = self._write, not self._limits.whole
        self._writing = self._writer.submit(write, cached.tokens, cached.salt, state, is_beside, removes)
        return True

    def _write(self, tokens: Tokens, salt: Salt, state: SavedState, is_beside: bool, removes: bool) -> None:
        """Runs on the writing thread. `removes`: delete files that this one makes redundant."""
        began = perf_counter()
        try:
            self._files.check()
            footer = self._index.footer(salt, state)
            name = self._index.name(tokens, footer)
            n_bytes = self._folder.write(name, tokens, state.data, footer)
        except OSError as error:
            self._pause(f"{self._folder.folder}: {error.strerror or error}")
        except ModelError:  # logged
            pass
        except Exception as error:
            log.exception("failed to write a cached prefix")
            self._pause(str(error))
        else:
            self._has_failed = False
            if n_bytes:
                self._index.add(name, tokens, salt, n_bytes, footer)
                self._cost.observe_write(n_bytes, perf_counter() - began)
                self.counts.written_bytes += n_bytes
                for covered in self._index.covered_by(name) if removes else ():
                    self._index.discard(covered)
                    self._folder.remove(covered)
                self.counts.entries = len(self._index)
        if is_beside:
            self._charge(perf_counter() - began)  # not only CPU time: the disk and the kernel slow steps down too

    def _pause(self, why: str) -> None:
        """Logs one line for a series of failures."""
        self._paused_until = self._clock() + _RETRY_WRITING_S
        if not self._has_failed:
            log.warning("cannot write cached prefixes to disk; retrying every %.0f s: %s", _RETRY_WRITING_S, why)
        self._has_failed = True

    def _charge(self, seconds: float) -> None:
        with self._lock:
            self._left_s -= seconds

    def _n_new(self, cached: CachedPrefix) -> int:
        """The number of a prefix's tokens that are not on disk. Marks the prefix with the most of them as used."""
        limits = TierLimits(whole=self._limits.whole, n_bytes=self._folder.max_bytes)
        found = self._index.best(cached.tokens, cached.salt, limits)
        if found is None:
            return len(cached.tokens)
        prefix, n = found
        if n >= self._min_tokens:
            self._touch(prefix.name)
        return len(cached.tokens) - n

    def _touch(self, name: str) -> None:
        """Sets a file's time, but not on every use, which would be a system call per request."""
        now = self._clock()
        if now >= self._touched.get(name, -_TOUCH_EVERY_S) + _TOUCH_EVERY_S:
            self._touched[name] = now
            self._folder.touch(name)
            if len(self._touched) > _MAX_CANDIDATES:
                self._touched = {name: now}

    def _n_bytes(self, n_tokens: int) -> int:
        """The approximate bytes of a state; 0 before any was seen."""
        return round(n_tokens * self._token_bytes)

    def close(self) -> None:
        """Waits for a file being written."""
        for threads in (self._writer, self._reader):
            threads.shutdown(cancel_futures=True)

    def abandon(self) -> None:
        """Closes without waiting. May be called on one of the threads that write and read."""
        for threads in (self._writer, self._reader):
            threads.shutdown(wait=False, cancel_futures=True)
