"""Measures settings, each in a child process, because llama.cpp may abort if memory runs out."""

from __future__ import annotations

import subprocess

import msgspec

from cppbatch.child_processes import child_command, run
from cppbatch.config import EngineConfig


class MeasurementTask(msgspec.Struct, frozen=True, kw_only=True):
    """Settings, and what to measure with them."""

    config: EngineConfig
    seconds: float
    """Duration of decoding; 0: only test whether the model loads and runs."""
    prompt_tokens: int = 0
    """Length of the prompt for measuring prefill; 0: do not measure prefill."""


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """The figures, or the error that prevented the measurement."""

    inter_token_ms: float = 0.0
    """Median duration of a step with all sequences decoding."""
    tokens_per_s: float = 0.0
    """Median speed of all sequences together in these steps."""
    prompt_tokens_per_s: float = 0.0
    steps: int = 0
    busy_cores: float = 0.0
    """Mean number of cores that other programs used during the measurement."""
    gpu_percent: float | None = None
    """The share of time with a running kernel, while all sequences decode; None if no GPU reports it."""
    kv_layout: str = ""
    """The layout in use."""
    error: str | None = None


def measure_in_child(task: MeasurementTask, timeout: float) -> Measurement:
    """Measures in a child process, which is killed after `timeout` seconds. Only raises KeyboardInterrupt."""
    try:
        command = child_command("cppbatch.bench.tune.measurement_child")
        done = run(command, stdin=msgspec.json.encode(task), seconds=timeout)
    except subprocess.TimeoutExpired:
        return Measurement(error=f"not finished within {timeout:.0f} s")
    except OSError as error:
        return Measurement(error=f"could not start a process: {error}")
    try:
        return msgspec.json.decode(done.stdout.rpartition(b"\n")[2], type=Measurement)
    except msgspec.DecodeError:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["no output"]
        return Measurement(error=f"exit code {done.returncode}: {last[0]}")
