#!/usr/bin/env python3
"""The engine beside OpenVINO GenAI and mistral.rs, without servers: the mixed load of `cppbatch bench serve`.

Each program is a process, with the Python of an environment that has its package, and all run alternately. As
soon as a request has ended, the next one is added, so that the same number of them is always running.

    python3 -m venv ~/openvino && ~/openvino/bin/pip install openvino-genai
    python3 -m venv ~/mistralrs && ~/mistralrs/bin/pip install mistralrs
    .venv/bin/python scripts/bench_python_peers.py -m model.Q8_0.gguf --openvino ~/openvino/bin/python \
        --mistralrs ~/mistralrs/bin/python [--turns 3] [--requests 48] [--at-once 16] [-t 2]

Inter-token times are those between two pieces of a text, which can have several tokens. mistral.rs takes texts and puts
them into the model's chat template, so its prompts are some tokens longer.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from statistics import median
from threading import Lock
from time import perf_counter, process_time
from typing import Any

LIMIT_S = 1800
OURS = "cppbatch"


@dataclass(frozen=True)
class Job:
    """What a program computes."""

    model: str
    threads: int
    at_once: int
    prompts: list[str]
    prompt_ids: list[list[int]]
    n_new: list[int]


@dataclass
class Stream:
    """The times of a request, in seconds."""

    sent: float
    pieces: list[float]
    """When each piece of text came, of one token or more."""
    n_tokens: int


Run = Callable[[range], list[Stream]]
"""Runs these requests of a job."""
STREAM_CELLS = 2048  # of each sequence
WARM_UP = 2  # requests with prompts that are not measured


# --- the programs: each runs in a separate process, with a Python that may not have cppbatch ------------------------


def run_cppbatch(job: Job) -> Run:
    from cppbatch import BatchInferenceEngine, SamplingParams

    n_ctx = job.at_once * STREAM_CELLS
    engine = BatchInferenceEngine(job.model, n_parallel=job.at_once, n_ctx=n_ctx, n_threads=job.threads)

    def add(i: int) -> None:
        params = SamplingParams(max_tokens=job.n_new[i], temperature=0, ignore_eos=True)
        engine.add_request(job.prompt_ids[i], params, request_id=str(i))

    def step() -> Iterable[tuple[int, int, bool]]:
        for event in engine.step():
            yield int(event.request_id), len(event.tokens), event.finish_reason is not None

    return lambda numbers: closed_loop(job, numbers, add, step)


def run_openvino(job: Job) -> Run:
    import numpy as np
    import openvino
    import openvino_genai

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.max_num_seqs, scheduler.cache_size = job.at_once, 1  # GB
    device = {"INFERENCE_NUM_THREADS": job.threads}
    pipeline = openvino_genai.ContinuousBatchingPipeline(job.model, scheduler, "CPU", device, {})
    handles: dict[int, Any] = {}

    def add(i: int) -> None:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos = job.n_new[i], True
        handles[i] = pipeline.add_request(i, openvino.Tensor(np.array([job.prompt_ids[i]], np.int64)), config)

    def step() -> Iterable[tuple[int, int, bool]]:
        pipeline.step()
        for i, handle in list(handles.items()):
            n = 0
            while handle.can_read():
                n += sum(len(output.generated_ids) for output in handle.read().values())
            is_done = handle.get_status() != openvino_genai.GenerationStatus.RUNNING
            if is_done:
                del handles[i]
            yield i, n, is_done

    return lambda numbers: closed_loop(job, numbers, add, step)


def run_mistralrs(job: Job) -> Run:
    os.environ["RAYON_NUM_THREADS"] = str(job.threads)
    from mistralrs import ChatCompletionRequest, Runner, Which

    model = Path(job.model)
    which = Which.GGUF(quantized_model_id=str(model.parent), quantized_filename=model.name)
    runner = Runner(which=which, max_seqs=job.at_once, prefix_cache_n=0, token_source="none")
    sending = Lock()

    def stream(i: int) -> Stream:
        request = ChatCompletionRequest(
            messages=job.prompts[i], model="default", max_tokens=job.n_new[i], temperature=0.0, stream=True,
            ignore_eos=True,
        )  # fmt: skip
        sent, pieces, usage = perf_counter(), [], None
        with sending:  # two threads in it at once: RuntimeError, already borrowed
            chunks = runner.send_chat_completion_request(request)
        for chunk in chunks:
            pieces.append(perf_counter())
            usage = chunk.usage or usage
        return Stream(sent, pieces, usage.completion_tokens if usage else len(pieces))

    def run(numbers: range) -> list[Stream]:
        with ThreadPoolExecutor(job.at_once) as pool:
            return list(pool.map(stream, numbers))

    return run


def closed_loop(
    job: Job, numbers: range, add: Callable[[int], None], step: Callable[[], Iterable[tuple[int, int, bool]]]
) -> list[Stream]:
    """Runs these requests. `step` gives the number of a request, its new tokens, and whether it has ended."""
    streams: dict[int, Stream] = {}
    n_running, waiting = 0, iter(numbers)
    while True:
        for i in islice(waiting, job.at_once - n_running):
            streams[i] = Stream(perf_counter(), [], 0)
            add(i)
            n_running += 1
        if not n_running:
            return list(streams.values())
        for i, n_tokens, is_done in step():
            streams[i].pieces += [perf_counter()] * (n_tokens > 0)
            streams[i].n_tokens += n_tokens
            n_running -= is_done


PROGRAMS = {OURS: run_cppbatch, "OpenVINO GenAI": run_openvino, "mistral.rs": run_mistralrs}


def child(name: str) -> None:
    """Runs the job in stdin. Prints its CPU time in seconds and a `Stream` for each request, in the last line."""
    job = Job(**json.load(sys.stdin))
    n = len(job.n_new) - WARM_UP
    run = PROGRAMS[name](job)
    run(range(n, n + WARM_UP))
    cpu = process_time()
    streams = run(range(n))
    print("\n" + json.dumps([process_time() - cpu, [asdict(stream) for stream in streams]]))


# --- turns ---------------------------------------------------------------------------------------------------------


def main() -> None:
    """Prints a row for each program: medians of the turns."""
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2])
        return
    from cppbatch.bench.report import markdown_table

    args = _arguments()
    pythons = {OURS: sys.executable, "OpenVINO GenAI": args.openvino, "mistral.rs": args.mistralrs}
    names = [name for name in PROGRAMS if pythons[name]]
    figures: dict[str, list[list[float]]] = {name: [] for name in names}
    for turn in range(args.turns):
        job = make_job(args, turn)
        for name in names[:: -1 if turn % 2 else 1]:
            figures[name].append(measure(pythons[name], name, job))
            print(f"turn {turn + 1}, {name}: {figures[name][-1][0]:.1f} tokens/s", file=sys.stderr, flush=True)
    rows = []
    for name in names:
        columns = list(zip(*figures[name], strict=True))
        speeds = f"{median(columns[0]):.1f} ({min(columns[0]):.1f} to {max(columns[0]):.1f})"
        rows.append([name, speeds, *(f"{median(column):,.0f}" for column in columns[1:])])
    print(f"{Path(args.model).stem}: {args.requests} requests, {args.at_once} at once, {args.threads} threads")
    times = [f"{name} {which}, ms" for name in ("TTFT", "inter-token") for which in ("p50", "p95")]
    print(markdown_table(["", "tokens/s", "tokens per CPU s", *times], rows))


def _arguments() -> argparse.Namespace:
    from cppbatch.config import available_threads
    from cppbatch.models.pull import choose_model

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", help="GGUF file of all programs (the default model)")
    parser.add_argument("--openvino", type=Path, help="a Python that has openvino-genai")
    parser.add_argument("--mistralrs", type=Path, help="a Python that has mistralrs")
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("-t", "--threads", type=int, default=available_threads())
    args = parser.parse_args()
    args.model = choose_model(args.model).absolute()
    return args


def make_job(args: argparse.Namespace, turn: int) -> Job:
    """Other prompts in each turn, of the same lengths: 20 to 900 tokens, and 16 to 128 new ones."""
    from cppbatch.bench.load.workload import Workload
    from cppbatch.bench.prompts import Lengths
    from cppbatch.llama import Model

    workload = Workload(
        kind="mixed", n_requests=args.requests + WARM_UP, prompt_tokens=Lengths(20, 900), output_tokens=Lengths(16, 128)
    )
    requests = workload.requests(seed=0, repeat=turn)
    with Model(args.model, no_alloc=True) as model:
        ids = [model.vocab.tokenize(request.prompt).tolist() for request in requests]
    new = [request.max_tokens for request in requests]
    return Job(str(args.model), args.threads, args.at_once, [request.prompt for request in requests], ids, new)


def measure(python: str | Path, name: str, job: Job) -> list[float]:
    """Tokens/s; tokens per second of CPU time, which other programs change little with `-t 1`; TTFT and the time
    between two pieces of a text in milliseconds, p50 and p95 of each."""
    import numpy as np

    command, given = [python, __file__, "--child", name], json.dumps(asdict(job))
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr}")
    cpu, found = json.loads(done.stdout.splitlines()[-1])
    streams = [Stream(**each) for each in found]
    if any(stream.n_tokens != n for stream, n in zip(streams, job.n_new, strict=False)):
        raise SystemExit(f"{name} has made other numbers of tokens than were asked for")
    seconds = max(stream.pieces[-1] for stream in streams) - min(stream.sent for stream in streams)
    first = [stream.pieces[0] - stream.sent for stream in streams]
    between = np.concatenate([np.diff(stream.pieces) for stream in streams])
    times = [1000 * float(value) for each in (first, between) for value in np.percentile(each, [50, 95])]
    n_tokens = sum(stream.n_tokens for stream in streams)
    return [n_tokens / seconds, n_tokens / cpu, *times]


if __name__ == "__main__":
    main()
