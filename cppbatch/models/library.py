"""Names of Ollama's library that are known to be a GGUF repository on the Hugging Face hub.

A name is `MODEL` or `MODEL:TAG`; a tag is a size (`8b`), or a size and a type of weights (`8b-instruct-q4_K_M`).
"""

from __future__ import annotations

import re

from cppbatch.models.hub import HubModel

_REPOSITORIES: dict[str, dict[str, str]] = {
    "all-minilm": {"": "second-state/All-MiniLM-L6-v2-Embedding-GGUF"},
    "gemma3": {"": "ggml-org/gemma-3-4b-it-GGUF", "270m": "ggml-org/gemma-3-270m-it-GGUF"}
    | {size: f"ggml-org/gemma-3-{size}-it-GGUF" for size in ("1b", "4b", "12b", "27b")},
    "gpt-oss": {
        "": "ggml-org/gpt-oss-20b-GGUF",
        "20b": "ggml-org/gpt-oss-20b-GGUF",
        "120b": "ggml-org/gpt-oss-120b-GGUF",
    },
    "llama3.1": {"": "bartowski/Meta-Llama-3.1-8B-Instruct-GGUF"}
    | {size.lower(): f"bartowski/Meta-Llama-3.1-{size}-Instruct-GGUF" for size in ("8B", "70B")},
    "llama3.2": {"": "bartowski/Llama-3.2-3B-Instruct-GGUF"}
    | {size.lower(): f"bartowski/Llama-3.2-{size}-Instruct-GGUF" for size in ("1B", "3B")},
    "llama3.3": {"": "bartowski/Llama-3.3-70B-Instruct-GGUF", "70b": "bartowski/Llama-3.3-70B-Instruct-GGUF"},
    "mistral": {"": "bartowski/Mistral-7B-Instruct-v0.3-GGUF", "7b": "bartowski/Mistral-7B-Instruct-v0.3-GGUF"},
    "nomic-embed-text": {"": "nomic-ai/nomic-embed-text-v1.5-GGUF"},
    "phi4": {"": "bartowski/phi-4-GGUF", "14b": "bartowski/phi-4-GGUF"},
    "qwen2.5": {"": "Qwen/Qwen2.5-7B-Instruct-GGUF"}
    | {
        size.lower(): f"Qwen/Qwen2.5-{size}-Instruct-GGUF" for size in ("0.5B", "1.5B", "3B", "7B", "14B", "32B", "72B")
    },
    "qwen2.5-coder": {"": "Qwen/Qwen2.5-Coder-7B-Instruct-GGUF"}
    | {size.lower(): f"Qwen/Qwen2.5-Coder-{size}-Instruct-GGUF" for size in ("0.5B", "1.5B", "3B", "7B", "14B", "32B")},
    "qwen3": {"": "Qwen/Qwen3-8B-GGUF"}
    | {size.lower(): f"Qwen/Qwen3-{size}-GGUF" for size in ("0.6B", "1.7B", "4B", "8B", "14B", "32B", "30B-A3B")}
    | {"30b": "Qwen/Qwen3-30B-A3B-GGUF"},
    "smollm2": {"": "bartowski/SmolLM2-1.7B-Instruct-GGUF"}
    | {size.lower(): f"bartowski/SmolLM2-{size}-Instruct-GGUF" for size in ("135M", "360M", "1.7B")},
}
"""By the model's name, and by its size; "": without a tag."""

_TYPE = re.compile(r"-?(fp16|bf16|q\d\w*|iq\d\w*)$", re.IGNORECASE)


def library_model(name: str) -> HubModel | None:
    """The repository of a name of Ollama's library, with the type of weights that its tag ends with; None: unknown."""
    model, _, tag = name.removesuffix(":latest").lower().partition(":")
    found = _TYPE.search(tag)
    kind = found[1].upper().replace("FP16", "F16") if found else ""
    size = tag[: found.start()] if found else tag
    size = size.removesuffix("-instruct").removesuffix("-it")
    repository = _REPOSITORIES.get(model, {}).get(size)
    return HubModel(repository, kind) if repository else None
