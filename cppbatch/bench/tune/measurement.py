"""Measures settings, each in a process of its own: llama.cpp may abort where memory runs out."""

from __future__ import annotations

import subprocess

import msgspec

from cppbatch.bench.child_process import run_module
from cppbatch.config import EngineConfig


class MeasurementTask(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure."""

    config: EngineConfig
    seconds: float
    """Of decoding; 0: only whether it can be loaded and computes."""
    prompt_tokens: int = 0
    """Of one prompt, whose reading is measured too."""


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured, or why it could not be."""

    inter_token_ms: float = 0.0
    """The median step with all sequences decoding."""
    tokens_per_s: float = 0.0
    """Of all sequences together, at that."""
    prompt_tokens_per_s: float = 0.0
    steps: int = 0
    kv_layout: str = ""
    """What was used."""
    error: str | None = None


def measure_in_child(task: MeasurementTask, timeout: float) -> Measurement:
    """Never raises but for an interrupt; a process that takes longer than `timeout` seconds is ended."""
    try:
        done = run_module("cppbatch.bench.tune.measurement_child", msgspec.json.encode(task), timeout)
    except subprocess.TimeoutExpired:
        return Measurement(error=f"not done within {timeout:.0f} s")
    except OSError as error:
        return Measurement(error=f"no process can be started: {error}")
    try:
        return msgspec.json.decode(done.stdout.rpartition(b"\n")[2], type=Measurement)
    except msgspec.DecodeError:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["without a word"]
        return Measurement(error=f"ended with code {done.returncode}: {last[0]}")
