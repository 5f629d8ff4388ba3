"""llama.cpp as a whole: initialised once, its log routed to `logging`, its devices."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import logging
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from cppbatch.llama.library import C, ggml, library_path

log = logging.getLogger("cppbatch.llama")

# llama.cpp's "info" is a page for every model load and its "warning" is mostly advice, so each goes one level down.
_LEVELS = {1: logging.DEBUG, 2: logging.DEBUG, 3: logging.INFO, 4: logging.ERROR}
_CONTINUATION = 5
_DEVICE_TYPES = {0: "CPU", 1: "GPU", 2: "integrated GPU", 3: "accelerator"}


@dataclass(frozen=True)
class Device:
    """A compute device as ggml names it. Memory in bytes; both 0 where the driver does not tell."""

    name: str
    description: str
    kind: str
    memory_free: int
    memory_total: int


class _LogRouter:
    """Turns llama.cpp's pieces of lines into log records."""

    def __init__(self) -> None:
        self.callback = C.llama_log_callback(self._receive)  # kept here: C holds no reference
        self.captured: dict[int, list[str]] = {}  # by thread: several models may load at once
        self.heard: dict[int, list[str]] = {}
        self._level, self._line = logging.DEBUG, ""

    def _receive(self, level: int, text: bytes, _user: object) -> None:
        if level != _CONTINUATION:
            self._level = _LEVELS.get(level, logging.DEBUG)
        self._line += text.decode("utf-8", "replace")
        if not self._line.endswith("\n"):
            return
        line, self._line = self._line.rstrip(), ""
        if (heard := self.heard.get(threading.get_ident())) is not None:
            heard.append(line)
        captured = self.captured.get(threading.get_ident())
        if captured is not None and self._level >= logging.ERROR:
            captured.append(line)
        elif line.strip(". "):
            log.log(self._level, "%s", line)


_ONCE = threading.Lock()


@functools.cache
def _the_backend() -> Backend:
    return Backend()


class Backend:
    """llama.cpp, initialised. Use `Backend.get()`: one a process."""

    def __init__(self) -> None:
        self._router = _LogRouter()
        C.llama_log_set(self._router.callback, ctypes.c_void_p(0))
        # A line logged while the interpreter goes down would call into freed Python objects.
        atexit.register(C.llama_log_set, C.llama_log_callback(0), ctypes.c_void_p(0))
        C.llama_backend_init()

    @staticmethod
    def get() -> Backend:
        """The process's backend, initialised by the first call. Any thread may call this."""
        with _ONCE:
            return _the_backend()

    @contextlib.contextmanager
    def errors(self) -> Iterator[list[str]]:
        """Collects the error lines that llama.cpp logs on this thread, for the message of an exception."""
        lines: list[str] = []
        self._router.captured[threading.get_ident()] = lines
        try:
            yield lines
        finally:
            del self._router.captured[threading.get_ident()]

    @contextlib.contextmanager
    def lines(self) -> Iterator[list[str]]:
        """Collects all lines that llama.cpp logs on this thread, of every level; they go to `logging` as well."""
        lines: list[str] = []
        self._router.heard[threading.get_ident()] = lines
        try:
            yield lines
        finally:
            del self._router.heard[threading.get_ident()]

    def devices(self) -> list[Device]:
        """Every device the library can compute on, with its free memory now."""
        lib = ggml()
        return [self._device(lib, lib.ggml_backend_dev_get(i)) for i in range(lib.ggml_backend_dev_count())]

    @staticmethod
    def _device(lib: ctypes.CDLL, handle: int) -> Device:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        lib.ggml_backend_dev_memory(handle, ctypes.byref(free), ctypes.byref(total))
        return Device(
            name=lib.ggml_backend_dev_name(handle).decode(),
            description=lib.ggml_backend_dev_description(handle).decode(),
            kind=_DEVICE_TYPES.get(lib.ggml_backend_dev_type(handle), "other"),
            memory_free=free.value,
            memory_total=total.value,
        )

    @property
    def version(self) -> str:
        """llama.cpp's own version."""
        return str(C.llama_version().decode())

    @property
    def build_flags(self) -> list[str]:
        """The CPU and device features that the library was built with, like "AVX2 = 1"."""
        return [part.strip() for part in C.llama_print_system_info().decode().split("|") if part.strip()]

    @property
    def has_amx(self) -> bool:
        """Whether matrices are multiplied by AMX."""
        return any(flag.startswith("AMX") and flag.endswith("= 1") for flag in self.build_flags)

    @property
    def supports_gpu(self) -> bool:
        """Whether this build can keep layers on a GPU."""
        return bool(C.llama_supports_gpu_offload())

    @property
    def library_path(self) -> str:
        """The path of the shared library."""
        return library_path()
