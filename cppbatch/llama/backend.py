"""The llama.cpp library of this process: initialisation, logging through `logging`, devices."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import re
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

import msgspec
import psutil

from cppbatch.config import CHOICES, Numa
from cppbatch.errors import CppBatchError, OutOfMemory, says_out_of_memory, shorten
from cppbatch.llama.library import C, ggml, library_path, load_backends
from cppbatch.llama.rpc import has_rpc, is_reachable, is_remote
from cppbatch.unclosed import call_at_exit

log = logging.getLogger("cppbatch.llama")

# One level lower than llama.cpp's: it logs a page of "info" for every model, and its "warning" is mostly advice.
_LEVELS = {1: logging.DEBUG, 2: logging.DEBUG, 3: logging.INFO, 4: logging.ERROR}
_VARIANT = re.compile(r"loaded CPU backend from .*ggml-cpu-([\w.]+)\.\w+$")
_SET_TERMINATE = "_ZSt13set_terminatePFvvE"  # std::set_terminate of GCC's and Clang's libraries
_DEVICE_TYPES = {0: "CPU", 1: "GPU", 2: "integrated GPU", 3: "accelerator"}


class Device(msgspec.Struct, frozen=True):
    """A compute device, with ggml's name. Memory in bytes; both sizes are 0 if the driver does not report them."""

    name: str
    description: str
    kind: str
    memory_free: int
    memory_total: int


def _kind(lib: ctypes.CDLL, handle: int) -> str:
    """The kind of a device. llama.cpp treats all devices of RPC workers as GPUs."""
    return "remote" if is_remote(handle) else _DEVICE_TYPES.get(lib.ggml_backend_dev_type(handle), "other")


class _LogRouter:
    """Assembles the fragments logged by llama.cpp into lines, and logs the lines."""

    def __init__(self) -> None:
        self.callback = C.llama_log_callback(self._receive)  # kept alive here: C holds no reference to it
        # Lists that receive lines, by thread, because several models may load at once:
        self.captured: dict[int, list[str]] = {}  # error lines; captured lines are not logged
        self.copied: dict[int, list[str]] = {}  # all lines
        self.recent: deque[tuple[float, str]] = deque(maxlen=4)  # error lines, with their time
        self._level, self._line = logging.DEBUG, ""

    def _receive(self, level: int, text: bytes, _user: object) -> None:
        if level != 5:  # GGML_LOG_LEVEL_CONT
            self._level = _LEVELS.get(level, logging.DEBUG)
        self._line += text.decode("utf-8", "replace")
        if not self._line.endswith("\n"):
            return
        line, self._line = shorten(self._line.rstrip()), ""
        if (copied := self.copied.get(threading.get_ident())) is not None:
            copied.append(line)
        if self._level >= logging.ERROR:
            self.recent.append((monotonic(), line))
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
    """The initialised llama.cpp library. There is one per process: `Backend.get()`."""

    def __init__(self) -> None:
        self._router = _LogRouter()
        C.llama_log_set(self._router.callback, ctypes.c_void_p(0))
        # A line logged during interpreter shutdown would call freed Python objects. Until then, this keeps the router
        # alive, even if the code below raises.
        call_at_exit(self._end_log)
        with self.lines() as lines:
            load_backends()
        found = next(filter(None, map(_VARIANT.search, lines)), None)
        self.cpu_variant = found[1] if found else None
        """The kernels chosen by a portable build for this CPU ("haswell", "zen4"); None in other builds."""
        C.llama_backend_init()
        self._has_numa = False

    def _end_log(self) -> None:
        C.llama_log_set(C.llama_log_callback(0), ctypes.c_void_p(0))

    @staticmethod
    def get() -> Backend:
        """The backend of this process, initialised by the first call. Thread-safe."""
        with _ONCE:
            return _the_backend()

    def write_last_words(self, file: Path) -> None:
        """When llama.cpp ends this process, `file` gets the last lines of its log and the reason: ggml's message, such
        as a failed assertion, or the C++ exception that nothing catches, as where a driver has no memory left."""

        def aborting(message: bytes) -> None:
            text = message.decode("utf-8", "replace")
            print(text, file=sys.stderr, flush=True)  # with an abort callback, ggml prints nothing
            file.write_text("\n".join([*self.recent_errors(), text]))

        def terminating() -> None:
            file.write_text("".join(f"{line}\n" for line in self.recent_errors()))
            os.environ["GGML_NO_BACKTRACE"] = "1"  # without a debugger, which prints where, but not why
            os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), 2)  # where the C++ library prints the exception
            default()

        lib = ctypes.CDLL(library_path())  # the ggml that llama.cpp uses
        self._abort_callback = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(aborting)  # C holds no reference to it
        lib.ggml_set_abort_callback(self._abort_callback)
        if set_terminate := getattr(lib, _SET_TERMINATE, None):
            self._terminate_callback = ctypes.CFUNCTYPE(None)(terminating)
            set_terminate.restype = ctypes.CFUNCTYPE(None)
            default = set_terminate(self._terminate_callback)

    def recent_errors(self) -> list[str]:
        """The error lines that llama.cpp has logged in the last 2 seconds, at most 4."""
        # error lines of the last two seconds belong to the failure
        return [line for at, line in list(self._router.recent) if monotonic() - at < 2.0]

    def failure(self, error: CppBatchError, reasons: Sequence[str]) -> CppBatchError:
        """The exception for a call that failed: `error`, or an `OutOfMemory` with its message and the free memory, if a
        log line in `reasons` says that memory could not be allocated."""
        line = next(filter(says_out_of_memory, reasons), None)
        if line is None:
            return error
        free = ", ".join(
            f"{each.memory_free / 2**30:.2f} of {each.memory_total / 2**30:.2f} GiB of {each.name}"
            for each in self.devices()
            if each.kind != "CPU" and each.memory_total
        )
        of_devices = f"; free now: {free}" if free else ""
        return OutOfMemory(f"{error} ({line.strip()}{of_devices})")

    @property
    def log_callback(self) -> Any:
        """The log callback for llama.cpp's other libraries."""
        return self._router.callback

    @contextlib.contextmanager
    def errors(self) -> Iterator[list[str]]:
        """Collects the error lines of this thread for an exception message, instead of logging them."""
        lines: list[str] = []
        self._router.captured[threading.get_ident()] = lines
        try:
            yield lines
        finally:
            del self._router.captured[threading.get_ident()]

    @contextlib.contextmanager
    def lines(self) -> Iterator[list[str]]:
        """Collects all lines that llama.cpp logs on this thread, at every level. They are also sent to `logging`."""
        lines: list[str] = []
        self._router.copied[threading.get_ident()] = lines
        try:
            yield lines
        finally:
            del self._router.copied[threading.get_ident()]

    def devices(self) -> list[Device]:
        """All devices that the library can compute on, with their current free memory; for RPC workers, only those of
        loaded models."""
        lib = ggml()
        handles = map(lib.ggml_backend_dev_get, range(lib.ggml_backend_dev_count()))
        return [self._device(lib, handle) for handle in handles if is_reachable(handle)]

    @staticmethod
    def _device(lib: ctypes.CDLL, handle: int) -> Device:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        lib.ggml_backend_dev_memory(handle, ctypes.byref(free), ctypes.byref(total))
        kind = _kind(lib, handle)
        return Device(
            name=lib.ggml_backend_dev_name(handle).decode(),
            description=lib.ggml_backend_dev_description(handle).decode(),
            kind=kind,
            # Of the CPU's memory, llama.cpp reports everything as free.
            memory_free=psutil.virtual_memory().available if kind == "CPU" else free.value,
            memory_total=total.value,
        )

    def use_numa(self, numa: Numa) -> None:
        """Sets where all compute threads of this process run. Only the first call with another value than off does."""
        if numa != "off" and not self._has_numa:
            self._has_numa = True
            C.llama_numa_init(CHOICES["numa"].index(numa))

    @property
    def version(self) -> str:
        """The version of llama.cpp."""
        return str(C.llama_version().decode())

    @property
    def build_flags(self) -> list[str]:
        """The CPU and device features that the library was built with, for example "AVX2 = 1"."""
        return [part.strip() for part in C.llama_print_system_info().decode().split("|") if part.strip()]

    @property
    def has_amx(self) -> bool:
        """Whether matrix products use AMX."""
        return any(flag.startswith("AMX") and flag.endswith("= 1") for flag in self.build_flags)

    @property
    def supports_gpu(self) -> bool:
        """Whether this machine has a GPU that this build can use.

        llama.cpp's own `llama_supports_gpu_offload` is true for every build with RPC.
        """
        lib = ggml()
        devices = map(lib.ggml_backend_dev_get, range(lib.ggml_backend_dev_count()))
        return any("GPU" in _kind(lib, device) for device in devices)

    @property
    def supports_rpc(self) -> bool:
        """Whether this build can use devices of other machines, and serve its own devices."""
        return has_rpc()

    @property
    def supports_openvino(self) -> bool:
        """Whether this build translates graphs for OpenVINO devices."""
        return bool(ggml().ggml_backend_reg_by_name(b"OPENVINO"))

    def offloads(self, n_gpu_layers: int, rpc: Sequence[str] = ()) -> bool:
        """Whether a model with these settings computes on a GPU or on devices of RPC workers, which count as GPUs."""
        return n_gpu_layers != 0 and (bool(rpc) or self.supports_gpu)

    @property
    def library_path(self) -> str:
        """The path of the shared library."""
        return library_path()
