"""LoRA adapters: small matrices that are added to a model's own, each with a scale, while a context computes."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cppbatch.errors import ModelError
from cppbatch.llama.adapter_file import check_adapter
from cppbatch.llama.backend import Backend
from cppbatch.llama.library import C

if TYPE_CHECKING:
    from cppbatch.llama.model import Model


def load_adapter(model: Model, path: Path) -> Any:
    """llama.cpp's pointer to an adapter for this model, which frees it with itself.

    Raises `ModelError`, with llama.cpp's own reason where it has one: for a file that is missing or no adapter, one for
    another architecture or base model, and aLoRA adapters.
    """
    if not path.is_file():
        raise ModelError(f"there is no adapter file at {path} (--lora)")
    metadata = model.metadata
    n_experts = metadata.get(f"{metadata.get('general.architecture')}.expert_count", "0")
    check_adapter(path, model.path, int(n_experts))
    with Backend.get().errors() as lines:
        handle = C.llama_adapter_lora_init(model.handle, os.fsencode(path))
    if not handle:
        reason = lines[-1].split("failed to apply lora adapter: ")[-1] if lines else "llama.cpp gives no reason"
        raise ModelError(f"{path} cannot be used as an adapter of {model.path.name}: {reason}")
    if C.llama_adapter_get_alora_n_invocation_tokens(handle):
        C.llama_adapter_lora_free(handle)
        raise ModelError(
            f"{path} is an aLoRA adapter, which changes a text from its invocation tokens on; only adapters that "
            "change all of it are served here"
        )
    return handle


def native_set(handles: list[Any], scales: list[float]) -> tuple[Any, int, Any]:
    """The arguments of `llama_set_adapters_lora` after the context."""
    n = len(handles)
    if n == 0:
        return None, 0, None
    return (C.llama_adapter_lora_p_ctypes * n)(*handles), n, (ctypes.c_float * n)(*scales)
