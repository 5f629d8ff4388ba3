"""Runs the checks on models, each model and layout in a separate child process, which may crash."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from cppbatch.llama.library import PINNED_VERSION

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "archs"
LAYOUTS = ("unified", "per-sequence")
FORMS = ("dense", "moe")

_WRITER = "test-llama-archs"
_SEED = "1"
_TIMEOUT_S = 1200  # of all checks of a model in one layout; quiet cores take 3 to 60 s


class Found(msgspec.Struct):
    """What the checks of one model in one layout found."""

    memory: str = ""
    words: dict[str, str] = {}
    details: dict[str, str] = {}
    seconds: float = 0


Results = dict[str, dict[str, Found]]
"""By the names of files without their suffix, then by layout."""


def make_models(names: Sequence[str]) -> list[Path]:
    """The tiny models of these architectures, or of all. Written where they are missing. Raises `SystemExit`."""
    folder = FOLDER / f"models-{PINNED_VERSION}"
    if not (folder / "complete").exists():
        folder.mkdir(parents=True, exist_ok=True)
        with (FOLDER / "writer.log").open("w") as log:
            subprocess.run([_writer(), "-s", _SEED, "-o", folder], stdout=log, stderr=log, check=True)
        (folder / "complete").touch()
    files = sorted(folder.glob("*.gguf"))
    known = sorted({architecture_of(file.stem) for file in files})
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"{_WRITER} writes no model of {', '.join(unknown)}, but of {', '.join(known)}")
    return [file for file in files if not names or architecture_of(file.stem) in names]


def architecture_of(name: str) -> str:
    """qwen3moe of "qwen3moe-moe"."""
    return name.rpartition("-")[0]


def _writer() -> str:
    found = os.environ.get("CPPBATCH_LLAMA_ARCHS") or shutil.which(_WRITER)
    if not found or not Path(found).expanduser().is_file():
        raise SystemExit(
            f"{found or _WRITER} was not found, the program of llama.cpp that writes the models. Build it from the "
            f"sources of llama-cpp-python {PINNED_VERSION} (cmake --build build --target {_WRITER}) and set "
            "CPPBATCH_LLAMA_ARCHS to its path, or add its folder to PATH"
        )
    return str(Path(found).expanduser())


def run(file: Path, layout: str, checks: Sequence[str]) -> Found:
    """What the checks find. A check that ends the process counts as "crash", and another process makes the others."""
    found, left = Found(), list(checks)
    while True:
        lines, code, last = _run_child(file, layout, left)
        running = ""
        for line in lines:
            if name := line.get("start"):
                running = name
            else:
                running = ""
                found.memory = line.get("memory") or found.memory
                found.words[line["check"]], found.details[line["check"]] = line["word"], line.get("detail", "")
                found.seconds += line.get("seconds", 0)
        if not running:
            if code != 0:
                found.words["end"], found.details["end"] = "crash", last
            return found
        found.words[running], found.details[running] = "timeout" if code is None else "crash", last
        if running == "load":
            return found
        left = left[left.index(running) + 1 :]
        if not left:
            return found


def _run_child(file: Path, layout: str, checks: Sequence[str]) -> tuple[list[dict[str, Any]], int | None, str]:
    """Its lines, its exit code (None: it was killed) and the last informative line of its errors."""
    command = [sys.executable, "-m", "tests.archs.child", str(file), layout, *checks]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "GGML_NO_BACKTRACE": "1"}
    code: int | None
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=_TIMEOUT_S, check=False)
        out, err, code = done.stdout, done.stderr, done.returncode
    except subprocess.TimeoutExpired as error:
        out, err, code = error.stdout or b"", error.stderr or b"", None
    says = [line for line in err.decode(errors="replace").splitlines() if line.strip()]
    asserts = [line for line in says if "GGML_ASSERT" in line or "GGML_ABORT" in line]
    last = (asserts or says or [f"exit code {code}"])[-1]
    with (FOLDER / "errors.log").open("ab") as log:
        log.write(f"== {file.name} {layout} {' '.join(checks)}: {code}\n".encode() + err)
    return (
        [json.loads(line) for line in out.decode().splitlines() if line.startswith("{")],
        code,
        last.rpartition("/")[2],
    )


def read_results() -> Results:
    """Those of earlier runs."""
    file = FOLDER / "results.json"
    return msgspec.json.decode(file.read_bytes(), type=Results) if file.exists() else {}


def write_results(results: Results) -> None:
    file = FOLDER / "results.json"
    part = file.with_suffix(".part")
    part.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1))
    part.replace(file)
