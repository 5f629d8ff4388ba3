"""A pytest plugin for llama-cpp-python's own tests: models that are here in place of those of a hub, and our class.

CPPBATCH_RING_CLASS: "cppbatch" or "llama_cpp", the class that the tests get as `llama_cpp.Llama`.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import tiny_models

_FOLDER = Path(tempfile.mkdtemp(prefix="llama-cpp-python-ring-"))


def _default_model() -> Path:
    from cppbatch import pull_default

    return pull_default()


MODELS: dict[str, Callable[[], Path]] = {
    "Qwen3.5-0.8B-Q8_0.gguf": _default_model,
    "tinyllamas/stories15M-q4_0.gguf": lambda: tiny_models.llama(_FOLDER / "llama.gguf"),
    "bge-small-en-v1.5-q4_k_m.gguf": lambda: tiny_models.encoder_only(_FOLDER / "bert.gguf"),
    "mamba-130m-hf.Q2_K.gguf": lambda: tiny_models.mamba(_FOLDER / "mamba.gguf"),
    "Falcon-H1-Tiny-90M-Instruct-Q2_K.gguf": lambda: tiny_models.hybrid(_FOLDER / "hybrid.gguf"),
}
"""By the name of the file that a test asks for. All but the first have random weights."""


def _stand_in(repo_id: str, filename: str) -> str:
    return str(MODELS[filename]())


def pytest_configure() -> None:
    import huggingface_hub

    huggingface_hub.hf_hub_download = _stand_in  # the tests import it by this name
    scipy: Any = types.ModuleType("scipy")  # a test file imports a function of it, and does not call it
    scipy.special = types.ModuleType("scipy.special")
    scipy.special.log_softmax = None
    sys.modules |= {"scipy": scipy, "scipy.special": scipy.special}
    if os.environ["CPPBATCH_RING_CLASS"] == "cppbatch":
        import cppbatch

        cppbatch.patch()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    report = (yield).get_result()
    if report.when == "call" or report.outcome != "passed":
        line = str(report.longrepr.reprcrash.message).splitlines()[0] if report.failed else ""
        with open(os.environ["CPPBATCH_RING_REPORTS"], "a", encoding="utf-8") as file:
            file.write(json.dumps({"test": item.name, "result": report.outcome, "why": line}) + "\n")
