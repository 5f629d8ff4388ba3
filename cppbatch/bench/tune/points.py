"""Measures settings, each in a process of its own: llama.cpp may abort where memory runs out."""

from __future__ import annotations

import subprocess

import msgspec

from cppbatch.bench.ask import ask
from cppbatch.config import EngineConfig


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure."""

    config: EngineConfig
    seconds: float
    """Of decoding; 0: only whether it can be loaded and computes."""
    prompt_tokens: int = 0
    """Of one prompt, whose reading is measured too."""


class Point(msgspec.Struct, frozen=True, kw_only=True):
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


def measure_point(task: Task, timeout: float) -> Point:
    """Never raises but for an interrupt; a process that takes longer than `timeout` seconds is ended."""
    try:
        done = ask("cppbatch.bench.tune.points_child", msgspec.json.encode(task), timeout)
    except subprocess.TimeoutExpired:
        return Point(error=f"not done within {timeout:.0f} s")
    except OSError as error:
        return Point(error=f"no process can be started: {error}")
    try:
        return msgspec.json.decode(done.stdout.rpartition(b"\n")[2], type=Point)
    except msgspec.DecodeError:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["without a word"]
        return Point(error=f"ended with code {done.returncode}: {last[0]}")
