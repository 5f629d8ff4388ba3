"""The child process of `measure_in_child`: runs the engine with the settings for a second or two."""

from __future__ import annotations

import contextlib
import statistics
import sys
from pathlib import Path
from time import perf_counter

import msgspec

from cppbatch.bench.resource_usage import ResourceUsage
from cppbatch.bench.tune.measurement import Measurement, MeasurementTask
from cppbatch.engine.compute_threads import busy_cores, read_cpu_times
from cppbatch.engine.engine import BatchInferenceEngine
from cppbatch.engine.params import SamplingParams
from cppbatch.errors import CppBatchError, ModelError

_WARM_UP = 2  # unmeasured steps


def main() -> None:
    """Reads a `MeasurementTask` from the standard input, writes a `Measurement` to the standard output."""
    with contextlib.suppress(OSError):  # Linux: if memory runs out, kill this process first
        Path("/proc/self/oom_score_adj").write_text("1000")
    task = msgspec.json.decode(sys.stdin.buffer.read(), type=MeasurementTask)
    try:
        with BatchInferenceEngine(task.config, spec="off") as engine:
            began, before = perf_counter(), read_cpu_times()
            point = _measure(engine, task)
            busy = busy_cores(before, read_cpu_times(), perf_counter() - began)
            point = msgspec.structs.replace(point, busy_cores=busy)
    except CppBatchError as error:
        point = Measurement(error=str(error))
    sys.stdout.buffer.write(b"\n" + msgspec.json.encode(point))


def _measure(engine: BatchInferenceEngine, task: MeasurementTask) -> Measurement:
    if engine.info.pooling:
        raise ModelError(f"{engine.info.name} returns embeddings; there are no settings to tune")
    engine.generate(
        [_prompt(engine, 1, 16)], SamplingParams(max_tokens=2, ignore_eos=True)
    )  # loads pages of the weights into memory
    prefill = _prefill_speed(engine, task.prompt_tokens) if task.prompt_tokens else 0.0
    if not task.seconds and task.prompt_tokens:
        return Measurement(prompt_tokens_per_s=prefill, kv_layout=engine.info.kv_layout)
    with ResourceUsage() as usage:
        # the decoding sequences have 32 tokens
        steps = _decode_steps(engine, task.seconds, n_prompt=32 if task.seconds else 1)
    if not task.seconds:  # a single step is not a speed measurement
        return Measurement(steps=len(steps), kv_layout=engine.info.kv_layout)
    return Measurement(
        inter_token_ms=1000 * statistics.median(seconds for seconds, _ in steps),
        tokens_per_s=statistics.median(tokens / seconds for seconds, tokens in steps), prompt_tokens_per_s=prefill,
        steps=len(steps), gpu_percent=usage.gpu_percent, kv_layout=engine.info.kv_layout,
    )  # fmt: skip


def _prefill_speed(engine: BatchInferenceEngine, n_tokens: int) -> float:
    """Returns tokens/s of prefill of one prompt alone."""
    prompt = _prompt(engine, 2, n_tokens)
    start = perf_counter()
    engine.generate([prompt], SamplingParams(max_tokens=1))
    return len(prompt) / (perf_counter() - start)


def _decode_steps(engine: BatchInferenceEngine, seconds: float, n_prompt: int) -> list[tuple[float, int]]:
    """Decodes all sequences for `seconds`, at least one step. Returns the seconds and tokens of each step.

    With few cells, the first sequences may end before the last prompts are computed.
    """
    n = engine.config.n_parallel
    max_tokens = max(4, min(engine.info.n_ctx // n, engine.info.max_sequence) - n_prompt)
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    ids = [engine.add_request(_prompt(engine, 3 + i, n_prompt), params) for i in range(n)]
    started: set[str] = set()
    while len(started) < n:  # until each has its first token
        started |= {event.request_id for event in engine.step()}
    adapted = perf_counter() + 1.1  # until the engine has adapted its threads to other programs
    for i in range(max(_WARM_UP, max_tokens // 4) if seconds else 0):
        if i >= _WARM_UP and perf_counter() > adapted:
            break
        engine.step()
    steps: list[tuple[float, int]] = []
    end = perf_counter() + seconds
    while len(steps) < (8 if seconds else 1) or perf_counter() < end:
        start = perf_counter()
        events = engine.step()
        steps.append((perf_counter() - start, sum(len(event.tokens) for event in events)))
        if any(event.finish_reason for event in events):
            break
    for request_id in ids:
        engine.cancel(request_id)
    return steps


def _prompt(engine: BatchInferenceEngine, which: int, n_tokens: int) -> list[int]:
    """Returns different tokens for each `which`, so that prompts do not share prefixes."""
    n = max(1, min(n_tokens, engine.info.max_sequence // 2))
    return [(7 * which + 3 * k) % (engine.info.n_vocab - 1) + 1 for k in range(n)]


if __name__ == "__main__":
    main()
