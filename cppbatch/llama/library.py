"""Loads llama_cpp on first use of a function, and checks that it is the version these wrappers are written for.

llama.cpp adds and renames functions between patch releases of llama-cpp-python, so a mismatch is reported when the
library is loaded instead of failing later in the middle of a request. Importing this package loads nothing: the
server process and tests with a fake model run without llama-cpp-python.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.util
import os
import re
import sys
import threading
import types
from pathlib import Path
from typing import Any

from cppbatch.errors import LibraryError, LlamaError

PINNED_VERSION = "0.3.36"

REINSTALL = (
    "CMAKE_ARGS=\"-DCMAKE_C_FLAGS='-fno-dse -fno-semantic-interposition' "
    "-DCMAKE_CXX_FLAGS='-fno-dse -fno-semantic-interposition'\" pip install --no-cache-dir "
    f"--force-reinstall --no-deps --no-binary llama-cpp-python llama-cpp-python=={PINNED_VERSION}"
)
"""The command that rebuilds the library for this CPU (-fno-dse is for GCC on x86-64: llama.cpp PR #26954)."""

_NEEDED = """
    llama_backend_init llama_numa_init llama_log_set llama_print_system_info llama_version
    llama_max_parallel_sequences llama_model_default_params llama_model_load_from_file llama_model_free
    llama_model_get_vocab llama_model_desc llama_model_size llama_model_n_params llama_model_n_layer llama_model_n_head
    llama_model_n_ctx_train llama_model_n_swa llama_model_n_embd_out llama_model_n_cls_out llama_model_cls_label
    llama_model_n_embd llama_model_n_embd_inp llama_model_n_layer_nextn llama_set_causal_attn llama_model_meta_count
    llama_model_meta_key_by_index llama_model_meta_val_str_by_index llama_model_chat_template
    llama_chat_builtin_templates llama_chat_apply_template
    llama_model_has_encoder llama_model_has_decoder llama_model_is_recurrent llama_model_is_hybrid
    llama_model_is_diffusion llama_vocab_type llama_vocab_get_text llama_vocab_n_tokens llama_vocab_is_eog
    llama_vocab_fim_pre llama_vocab_fim_suf llama_vocab_fim_mid llama_vocab_fim_rep llama_vocab_fim_sep
    llama_vocab_bos llama_vocab_eos llama_vocab_eot llama_vocab_sep llama_vocab_get_add_bos llama_vocab_get_add_eos
    llama_vocab_get_add_sep llama_tokenize llama_token_to_piece
    llama_context_default_params llama_init_from_model llama_free llama_n_ctx llama_n_ctx_seq llama_n_batch
    llama_n_ubatch llama_n_rs_seq llama_get_memory llama_decode llama_set_n_threads llama_synchronize llama_get_logits
    llama_encode llama_get_embeddings llama_get_embeddings_seq
    llama_memory_clear llama_memory_seq_rm llama_memory_seq_cp llama_memory_seq_pos_max llama_memory_seq_pos_min
    llama_memory_seq_add
    llama_memory_can_shift
    llama_state_seq_get_size_ext llama_state_seq_get_data_ext llama_state_seq_set_data_ext
    llama_sampler_chain_default_params llama_sampler_chain_init llama_sampler_chain_add llama_set_sampler
    llama_get_sampled_candidates_count_ith llama_get_sampled_candidates_ith llama_get_sampled_logits_ith
    llama_sampler_apply
    llama_sampler_accept llama_sampler_free llama_sampler_init_penalties llama_sampler_init_top_k
    llama_sampler_init_top_p llama_sampler_init_min_p llama_sampler_init_dist
    llama_sampler_init_greedy llama_sampler_init_temp_ext llama_sampler_init_top_n_sigma llama_sampler_init_typical
    llama_sampler_init_xtc llama_sampler_init_mirostat llama_sampler_init_mirostat_v2 llama_sampler_init_adaptive_p
    llama_sampler_init_dry llama_sampler_clone llama_vocab_get_suppress_tokens llama_vocab_get_attr
    llama_model_quantize llama_model_quantize_default_params
    llama_adapter_lora_init llama_adapter_lora_free llama_adapter_get_alora_n_invocation_tokens llama_set_adapters_lora
    llama_set_adapter_cvec
""".split()


class _Package(types.ModuleType):
    """The package `llama_cpp` without its content, which imports Jinja2, DiskCache and SQLite: that takes as long as
    the rest of the imports of llama.cpp. The first use of a name of the package brings it."""

    __version__: str
    _lock = threading.RLock()

    def __getattr__(self, name: str) -> Any:
        with self._lock:
            if self.__class__ is _Package:
                self.__class__ = types.ModuleType  # type: ignore[assignment]
                assert self.__spec__
                assert self.__spec__.loader
                self.__spec__.loader.exec_module(self)
        return getattr(self, name)


def _load() -> Any:
    # If ggml aborts, its message is enough; the backtrace would be a hundred lines.
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")
    try:
        version = _add_package()
        bindings = importlib.import_module("llama_cpp.llama_cpp")
    except ImportError as error:
        raise LibraryError(
            f"llama-cpp-python cannot be imported ({error}). Install it with:\n  {REINSTALL}\n"
            '(`pip install "cppbatch[llama]"` builds it with the default flags; in a checkout, '
            "`python3 scripts/install.py` builds it with the flags for this machine)"
        ) from error
    except (
        OSError,
        RuntimeError,
        AttributeError,
    ) as error:  # the shared library is missing, for another platform, or too old
        raise LibraryError(
            f"llama.cpp's library could not be loaded ({error}). Rebuild it with:\n  {REINSTALL}"
        ) from error
    if version != PINNED_VERSION:
        raise LibraryError(
            f"llama-cpp-python {version} is installed, but this cppbatch requires {PINNED_VERSION}: "
            f"llama.cpp's API changes between patch releases. Install it with:\n  {REINSTALL}"
        )
    missing = [name for name in _NEEDED if not hasattr(bindings, name)]
    if missing:
        raise LibraryError(
            f"this llama-cpp-python {PINNED_VERSION} lacks {', '.join(missing)}: its library is from a different "
            f"version. Rebuild it with:\n  {REINSTALL}"
        )
    return bindings


def _add_package() -> str:
    """Makes the modules of `llama_cpp` importable, and returns its version. Raises `ImportError` and `OSError`."""
    if imported := sys.modules.get("llama_cpp"):
        return str(imported.__version__)
    spec = importlib.util.find_spec("llama_cpp")
    if not spec or not spec.origin:
        raise ImportError("No module named 'llama_cpp'", name="llama_cpp")
    package = _Package("llama_cpp")
    package.__spec__, package.__path__ = spec, spec.submodule_search_locations  # type: ignore[assignment]
    package.__file__, package.__package__, package.__loader__ = spec.origin, "llama_cpp", spec.loader
    if found := re.search(r'^__version__ = "(.+)"', Path(spec.origin).read_text(), re.MULTILINE):
        package.__version__ = found[1]
    sys.modules["llama_cpp"] = package
    return str(package.__version__)


class _Bindings:
    """All names of `llama_cpp.llama_cpp`; the first access loads it, later ones are plain attribute lookups."""

    def __getattr__(self, name: str) -> Any:
        bindings = _load()
        self.__dict__.update(vars(bindings))
        return getattr(bindings, name)


def check_library() -> None:
    """Raises `LibraryError` if llama-cpp-python is missing, or not the version that these wrappers are written for."""
    _load()


C: Any = _Bindings()
"""The ctypes bindings, `llama_cpp.llama_cpp`. The first access raises `LibraryError` if they cannot be used."""


_NEEDED_BY_HEADS = (
    "llama_set_embeddings_nextn",
    "llama_get_embeddings_nextn",
    "llama_set_nextn_layer_offset",
)


@functools.cache
def nextn() -> Any:
    """The functions for draft heads: `llama_cpp.llama_cpp_ext`, an unstable API. Raises `LlamaError`."""
    _load()
    try:
        llama_cpp_ext = importlib.import_module("llama_cpp.llama_cpp_ext")
    except (ImportError, AttributeError) as error:  # the import looks up each function in the library
        raise LlamaError(f"this llama-cpp-python lacks the functions for draft heads ({error})") from error
    if missing := [name for name in _NEEDED_BY_HEADS if not hasattr(llama_cpp_ext, name)]:
        raise LlamaError(f"this llama-cpp-python lacks {', '.join(missing)}")
    return llama_cpp_ext


def why_no_heads() -> str | None:
    """The reason why the draft head in a model file cannot be used; None if it can."""
    try:
        nextn()
    except LlamaError as error:
        return str(error)
    return None


_LAYER_ROWS = {
    "set_rows": ("_Z30llama_set_embeddings_layer_inpP13llama_contextjb", None, (ctypes.c_uint32, ctypes.c_bool)),
    "get_rows": (
        "_Z30llama_get_embeddings_layer_inpP13llama_contextj",
        ctypes.POINTER(ctypes.c_float),
        (ctypes.c_uint32,),
    ),
}
"""Functions of llama.cpp's llama-ext.h that llama-cpp-python does not bind, under their C++ names: symbol, result type,
arguments after the context."""


@functools.cache
def layer_rows() -> Any:
    """The functions for the input rows of a model's layers: `set_rows(context, layer, value)`, and
    `get_rows(context, layer)`, a pointer to floats. Raises `LlamaError` if the library does not export them."""
    nextn()
    functions = types.SimpleNamespace()
    for name, (symbol, result, arguments) in _LAYER_ROWS.items():
        try:
            function = getattr(C._lib, symbol)
        except AttributeError as error:
            raise LlamaError(f"this build of llama.cpp does not export {symbol}") from error
        function.restype, function.argtypes = result, (ctypes.c_void_p, *arguments)
        setattr(functions, name, function)
    return functions


def why_no_layer_rows() -> str | None:
    """The reason why draft models cannot read the hidden rows of their target; None if they can."""
    try:
        layer_rows()
    except LlamaError as error:
        return str(error)
    return None


def library_path() -> str:
    """The path of the shared library (libllama). Raises `LibraryError`."""
    return str(C._lib._name)


def ggml() -> ctypes.CDLL:
    """ggml's library, with the functions about devices that llama-cpp-python does not declare.

    Raises `LibraryError`.
    """
    _load()
    from llama_cpp._ggml import libggml

    lib: ctypes.CDLL = libggml
    size_p = ctypes.POINTER(ctypes.c_size_t)
    lib.ggml_backend_load_all_from_path.argtypes = [ctypes.c_char_p]
    lib.ggml_backend_load_all_from_path.restype = None
    lib.ggml_backend_reg_count.restype = ctypes.c_size_t
    lib.ggml_backend_reg_by_name.argtypes = [ctypes.c_char_p]
    lib.ggml_backend_reg_by_name.restype = ctypes.c_void_p
    lib.ggml_backend_dev_count.restype = ctypes.c_size_t
    lib.ggml_backend_dev_get.argtypes = [ctypes.c_size_t]
    lib.ggml_backend_dev_get.restype = ctypes.c_void_p
    lib.ggml_backend_dev_memory.argtypes = [ctypes.c_void_p, size_p, size_p]
    lib.ggml_backend_dev_memory.restype = None
    lib.ggml_backend_dev_buffer_type.argtypes = [ctypes.c_void_p]
    lib.ggml_backend_dev_buffer_type.restype = ctypes.c_void_p
    lib.ggml_backend_buft_name.argtypes = [ctypes.c_void_p]
    lib.ggml_backend_buft_name.restype = ctypes.c_char_p
    lib.ggml_backend_cpu_buffer_type.argtypes = []
    lib.ggml_backend_cpu_buffer_type.restype = ctypes.c_void_p
    for name, restype in (
        ("name", ctypes.c_char_p),
        ("description", ctypes.c_char_p),
        ("type", ctypes.c_int),
    ):
        function = getattr(lib, f"ggml_backend_dev_{name}")
        function.argtypes, function.restype = [ctypes.c_void_p], restype
    return lib


def load_backends() -> None:
    """Loads the backends of a portable build (scripts/build_wheel.py), which are separate libraries; for the CPU, the
    fastest variant that it supports. In other builds they are part of the main library.

    Raises `LibraryError` if no variant for the CPU can be loaded.
    """
    lib = ggml()
    if lib.ggml_backend_reg_count():
        return
    folder = Path(lib._name).parent
    lib.ggml_backend_load_all_from_path(os.fsencode(folder))
    if not lib.ggml_backend_reg_by_name(b"CPU"):
        raise LibraryError(
            f"llama.cpp's CPU backend cannot be loaded from {folder}. Install the OpenMP library (Debian/Ubuntu: "
            f"sudo apt install libgomp1), or rebuild llama-cpp-python with:\n  {REINSTALL}"
        )
