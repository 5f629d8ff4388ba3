"""`python -m tests.llama_cpp_python [PYTEST ARGUMENTS...]`: llama-cpp-python's own tests with `cppbatch.Llama`.

They come with its source package, and run once with its class and once with ours, with models that are here in place of
those of a hub (`stand_ins`). Fails when a test that passes with the original fails with ours and is not an exception
below, and when an exception passes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.llama_cpp_source import binding_tests

_ROOT = Path(__file__).parents[2]
EXCEPTIONS = {
    "test_ram_cache_exact_prompt_hit_matches_fresh": "counts calls of `load_state`: prompts are in the prefix cache, "
    "and the object given to `set_cache` is not asked",
}
"""Tests that fail with our class only, and why. The part of a name in brackets is left out."""
NOT_HERE = {
    "test_real_model": "wants the token ids of Qwen 3.5; llama.cpp's functions only, no Llama object",
    "test_real_llama": "wants sentences as Qwen 3.5 writes them; its calls are in tests/integration too",
    "test_real_llama_repeated_prompt_cache": "wants a sentence as Qwen 3.5 writes it",
}
"""Tests that fail with both classes, because the model that they name cannot be had."""


def run(which: str, arguments: list[str]) -> dict[str, tuple[str, str]]:
    """The result of each test with a class, and why it failed."""
    with tempfile.TemporaryDirectory() as folder:
        reports = Path(folder) / "reports.jsonl"
        environment = os.environ | {
            "PYTHONPATH": str(_ROOT),
            "PYTHONDONTWRITEBYTECODE": "1",
            "CPPBATCH_RING_CLASS": which,
            "CPPBATCH_RING_REPORTS": str(reports),
        }
        command = [sys.executable, "-m", "pytest", "-c", "/dev/null", "--rootdir", ".", "-q", "--timeout", "120"]
        command += ["-p", "tests.llama_cpp_python.stand_ins", "-p", "no:cacheprovider", "tests", *arguments]
        ended = subprocess.run(
            command, cwd=binding_tests(), env=environment, capture_output=True, text=True, check=False
        )
        assert ended.returncode in (0, 1), ended.stdout + ended.stderr
        lines = map(json.loads, reports.read_text("utf-8").splitlines())
        return {line["test"]: (line["result"], line["why"]) for line in lines}


def main() -> int:
    original, ours = (run(which, sys.argv[1:]) for which in ("llama_cpp", "cppbatch"))
    surprises = 0
    for test, (result, why) in ours.items():
        name = test.partition("[")[0]
        reason = EXCEPTIONS.get(name) or NOT_HERE.get(name)
        is_known = (result == "failed") == (reason is not None)
        is_known &= (original[test][0] == "failed") == (name in NOT_HERE)
        surprises += not is_known
        note = "" if is_known and result == "passed" else f"   {reason or why}"
        print(f"{'' if is_known else 'UNEXPECTED '}{test}: {original[test][0]}, {result}{note}")
    n_there, n_here = (sum(result == "passed" for result, _ in found.values()) for found in (original, ours))
    print(f"\nllama_cpp.Llama passes {n_there} of {len(ours)}, cppbatch.Llama {n_here}")
    return 1 if surprises else 0


if __name__ == "__main__":
    sys.exit(main())
