#!/usr/bin/env python3
"""Compares Python packages on one model, without servers: the engine, OpenVINO GenAI, mistral.rs.

Each measurement is a process of its own, with the Python of an environment that has the package; all alternately.

    python3 -m venv ~/openvino && ~/openvino/bin/pip install openvino-genai
    python3 -m venv ~/mistralrs && ~/mistralrs/bin/pip install mistralrs
    .venv/bin/python scripts/bench_python_peers.py -m model.Q8_0.gguf --openvino ~/openvino/bin/python \
        --mistralrs ~/mistralrs/bin/python [--turns 3] [--requests 48] [--at-once 16] [-t 2]

The load is the mixed one of `cppbatch bench serve`; as soon as a request has ended, the next one is added. Inter-token
times are those between two pieces of a text, which can have several tokens. mistral.rs puts texts into the model's chat
template, so its prompts are some tokens longer.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from threading import Lock
from time import perf_counter, process_time
from types import SimpleNamespace
from typing import Any

LIMIT_S, WARM_UP = 1800, 2  # WARM_UP: requests with prompts that are not measured
STREAM_CELLS = 2048  # of each sequence
OURS, OPENVINO, MISTRALRS = "cppbatch", "OpenVINO GenAI", "mistral.rs"

Stream = dict[str, Any]
"""A request: when it was sent, when each piece of text came, of one token or more (seconds), and the tokens."""
Run = Callable[[range], Iterable[Stream]]
"""Runs these requests of a job."""


# --- the programs: each runs in a separate process, with a Python that may not have cppbatch ------------------------
# `job`: model, threads, at_once; of each request prompts, prompt_ids, n_new.


def run_cppbatch(job: Any) -> Run:
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


def run_openvino(job: Any) -> Run:
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
            if is_done := handle.get_status() != openvino_genai.GenerationStatus.RUNNING:
                del handles[i]
            yield i, n, is_done

    return lambda numbers: closed_loop(job, numbers, add, step)


def run_mistralrs(job: Any) -> Run:
    os.environ["RAYON_NUM_THREADS"] = str(job.threads)
    from mistralrs import ChatCompletionRequest, Runner, Which

    model = Path(job.model)
    which = Which.GGUF(quantized_model_id=str(model.parent), quantized_filename=model.name)
    runner = Runner(which=which, max_seqs=job.at_once, prefix_cache_n=0, token_source="none")
    sending, threads = Lock(), ThreadPoolExecutor(job.at_once)

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
        return {"sent": sent, "pieces": pieces, "n_tokens": usage.completion_tokens if usage else len(pieces)}

    return lambda numbers: threads.map(stream, numbers)


PROGRAMS: dict[str, Callable[[Any], Run]] = {OURS: run_cppbatch, OPENVINO: run_openvino, MISTRALRS: run_mistralrs}


def closed_loop(
    job: Any, numbers: range, add: Callable[[int], None], step: Callable[[], Iterable[tuple[int, int, bool]]]
) -> list[Stream]:
    """Runs these requests. `step` gives the number of a request, its new tokens, and whether it has ended."""
    streams: dict[int, Stream] = {}
    n_running, waiting = 0, iter(numbers)
    while True:
        for i in islice(waiting, job.at_once - n_running):
            streams[i] = {"sent": perf_counter(), "pieces": [], "n_tokens": 0}
            add(i)
            n_running += 1
        if not n_running:
            return list(streams.values())
        for i, n_tokens, is_done in step():
            streams[i]["pieces"] += [perf_counter()] * (n_tokens > 0)
            streams[i]["n_tokens"] += n_tokens
            n_running -= is_done


def child(name: str) -> None:
    """Runs the job in stdin. Prints its CPU seconds and streams."""
    job = SimpleNamespace(**json.load(sys.stdin))
    run, n = PROGRAMS[name](job), len(job.n_new) - WARM_UP
    list(run(range(n, n + WARM_UP)))
    cpu = process_time()
    streams = list(run(range(n)))
    print("\n" + json.dumps([process_time() - cpu, streams]))


# --- turns ---------------------------------------------------------------------------------------------------------


def main() -> None:
    """Prints a row for each program: medians of the turns."""
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2])
        return
    from measuring import Comparison, script_arguments

    from cppbatch.bench.report import Column
    from cppbatch.config import available_threads
    from cppbatch.models.pull import choose_model

    parser = script_arguments(__doc__, turns=3)
    parser.add_argument("--openvino", type=Path, help="a Python that has openvino-genai")
    parser.add_argument("--mistralrs", type=Path, help="a Python that has mistralrs")
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("-t", "--threads", type=int, default=available_threads())
    args = parser.parse_args()
    args.model = choose_model(args.model).absolute()
    given = {OURS: sys.executable, OPENVINO: args.openvino, MISTRALRS: args.mistralrs}
    pythons = {name: python for name, python in given.items() if python}
    jobs = [make_job(args, turn) for turn in range(args.turns)]
    compared = Comparison(pythons).measure(
        args.turns, lambda name, turn: measure([pythons[name], __file__, "--child", name], jobs[turn])
    )
    print(f"\n{args.model.stem}: {args.requests} requests, {args.at_once} at once, -t {args.threads}:\n")
    columns = [
        Column("tokens_per_second", "tokens/s"), Column("per_cpu", "tokens per CPU s", 0),
        *(Column(f"{key}_p{p}", f"{title} p{p}, ms", 0) for key, title in (("ttft", "TTFT"), ("gap", "inter-token"))
          for p in (50, 95)),
    ]  # fmt: skip
    print(compared.table(columns, {"tokens_per_second": "ratio: tokens/s"}))


def make_job(args: argparse.Namespace, turn: int) -> dict[str, Any]:
    """Returns other prompts in each turn, of the same lengths: 20 to 900 tokens, and 16 to 128 new ones."""
    from cppbatch.bench.load.workload import make_workload
    from cppbatch.bench.prompts import Lengths
    from cppbatch.llama import Model

    workload = make_workload(
        "mixed", args.requests + WARM_UP, prompt_tokens=Lengths(20, 900), output_tokens=Lengths(16, 128)
    )
    requests = workload.requests(seed=0, repeat=turn)
    prompts = [str(request.prompt) for request in requests]
    with Model(args.model, no_alloc=True) as model:
        ids = [model.vocab.tokenize(prompt).tolist() for prompt in prompts]
    n_new = [request.max_tokens for request in requests]
    sizes = {"model": str(args.model), "threads": args.threads, "at_once": args.at_once}
    return sizes | {"prompts": prompts, "prompt_ids": ids, "n_new": n_new}


def measure(command: list[Any], job: dict[str, Any]) -> dict[str, float | None]:
    """Returns tokens/s, also per second of CPU time, which other programs change little, and percentiles of TTFT and of
    the time between two pieces of a text in milliseconds."""
    from measuring import milliseconds

    done = subprocess.run(command, input=json.dumps(job), capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if done.returncode:
        raise SystemExit(f"{command[-1]} failed:\n{done.stderr}")
    cpu_s, streams = json.loads(done.stdout.splitlines()[-1])
    if [each["n_tokens"] for each in streams] != job["n_new"][:-WARM_UP]:
        raise SystemExit(f"{command[-1]} has made other numbers of tokens than were asked for")
    seconds = max(each["pieces"][-1] for each in streams) - min(each["sent"] for each in streams)
    n_tokens = sum(each["n_tokens"] for each in streams)
    ttft = [each["pieces"][0] - each["sent"] for each in streams]
    gaps = [b - a for each in streams for a, b in zip(each["pieces"], each["pieces"][1:], strict=False)]
    return {
        "tokens_per_second": n_tokens / seconds, "per_cpu": n_tokens / cpu_s,
        **{f"{key}_p{p}": milliseconds(times, p) for key, times in (("ttft", ttft), ("gap", gaps)) for p in (50, 95)},
    }  # fmt: skip


if __name__ == "__main__":
    main()
