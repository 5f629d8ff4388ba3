#!/usr/bin/env python3
"""Compares Python packages on one model, without servers: the engine, OpenVINO GenAI, mistral.rs, llama-cpp-python.

Each measurement is a process of its own, with the Python of an environment that has the package; all alternately.

    python3 -m venv ~/openvino && ~/openvino/bin/pip install openvino-genai
    python3 -m venv ~/mistralrs && ~/mistralrs/bin/pip install mistralrs
    .venv/bin/python scripts/bench_python_peers.py -m model.Q8_0.gguf --openvino ~/openvino/bin/python \
        --mistralrs ~/mistralrs/bin/python [--turns 3] [--requests 48] [--at-once 16] [-t 2]
    .venv/bin/python scripts/bench_python_peers.py --classes [-m model.gguf] [--turns 5] [--at-once 16] [--new 64]

The load is the mixed one of `cppbatch bench serve`; as soon as a request has ended, the next one is added. Inter-token
times are those between two pieces of a text, which can have several tokens. mistral.rs puts texts into the model's chat
template, so its prompts are some tokens longer. --classes: `cppbatch.Llama` and `llama_cpp.Llama` answer chats of as
many threads; those of llama_cpp.Llama wait for each other at a lock, since its object answers one request at a time.
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
from functools import partial
from itertools import islice
from pathlib import Path
from threading import Lock
from time import perf_counter, process_time
from typing import Any

LIMIT_S = 1800
STREAM_CELLS = 2048  # of each sequence
WARM_UP = 2  # requests with prompts that are not measured
OURS, CLASSES = "cppbatch", ["llama_cpp.Llama", "cppbatch.Llama"]
PLACES = "kitchen garden harbour library forest market school garage museum station bakery farm church office hotel zoo"


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

    return lambda numbers: in_threads(job, numbers, stream)


def run_class(job: Job, package: str) -> Run:
    from importlib import import_module

    llm = import_module(package).Llama(
        job.model, n_ctx=1024, n_threads=job.threads, n_threads_batch=job.threads, verbose=False
    )
    lock = Lock()

    def stream(i: int) -> Stream:
        messages, sent = [{"role": "user", "content": job.prompts[i]}], perf_counter()
        if package == "llama_cpp":
            with lock:
                answer = llm.create_chat_completion(messages, max_tokens=job.n_new[i], temperature=0)
        else:
            answer = llm.create_chat_completion(messages, max_tokens=job.n_new[i], temperature=0)
        return Stream(sent, [perf_counter()], answer["usage"]["completion_tokens"])

    return lambda numbers: in_threads(job, numbers, stream)


def in_threads(job: Job, numbers: range, stream: Callable[[int], Stream]) -> list[Stream]:
    with ThreadPoolExecutor(job.at_once) as pool:
        return list(pool.map(stream, numbers))


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


PROGRAMS: dict[str, Callable[[Job], Run]] = {
    OURS: run_cppbatch, "OpenVINO GenAI": run_openvino, "mistral.rs": run_mistralrs,
    **{name: partial(run_class, package=name.partition(".")[0]) for name in CLASSES},
}  # fmt: skip


def child(name: str) -> None:
    """Runs the job in stdin. Prints seconds until the first warm-up request has ended, CPU seconds, and the streams."""
    job, began = Job(**json.load(sys.stdin)), perf_counter()
    n = len(job.n_new) - WARM_UP
    run = PROGRAMS[name](job)
    loaded = perf_counter()
    run(range(n, n + 1))
    first = perf_counter()
    run(range(n + 1, n + WARM_UP))
    cpu = process_time()
    streams = run(range(n))
    found = {"load_s": loaded - began, "first_s": first - began, "cpu_s": process_time() - cpu}
    print("\n" + json.dumps([found, [asdict(stream) for stream in streams]]))


# --- turns ---------------------------------------------------------------------------------------------------------


def main() -> None:
    """Prints a row for each program: medians of the turns."""
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2])
        return
    from measuring import Comparison

    from cppbatch.bench.report import Column

    args = _arguments()
    times = [(f"{key}_p{p}", f"{title} p{p}, ms") for key, title in (("ttft", "TTFT"), ("gap", "inter-token"))
             for p in (50, 95)]  # fmt: skip
    columns = [Column("tokens_per_second", "tokens/s"), Column("per_cpu", "tokens per CPU s", 0)]
    if args.classes:
        pythons = dict.fromkeys(CLASSES, sys.executable)
        columns = [columns[0], Column("first_s", "s to the first answer", 2), Column("load_s", "s to load", 2)]
        jobs = {n: [chat_job(args, n)] * args.turns for n in (args.at_once, 1)}
    else:
        found = {OURS: sys.executable, "OpenVINO GenAI": args.openvino, "mistral.rs": args.mistralrs}
        pythons = {name: python for name, python in found.items() if python}
        columns += [Column(key, title, 0) for key, title in times]
        jobs = {args.at_once: [mixed_job(args, turn) for turn in range(args.turns)]}
    for n, of_turns in jobs.items():
        compared = Comparison(pythons).measure(
            args.turns,
            lambda name, turn: measure(pythons[name], name, of_turns[turn]),  # noqa: B023
        )
        print(
            f"\n{Path(args.model).stem}: {len(of_turns[0].n_new) - WARM_UP} requests, {n} at once, -t {args.threads}:\n"
        )
        ratios = {column.key: f"ratio: {column.title}" for column in columns[: 1 if not args.classes else 3]}
        print(compared.table(columns, ratios))


def _arguments() -> argparse.Namespace:
    from measuring import script_arguments

    from cppbatch.config import available_threads
    from cppbatch.models.pull import choose_model

    parser = script_arguments(__doc__, turns=3)
    parser.add_argument("--openvino", type=Path, help="a Python that has openvino-genai")
    parser.add_argument("--mistralrs", type=Path, help="a Python that has mistralrs")
    parser.add_argument("--classes", action="store_true", help="compare cppbatch.Llama with llama_cpp.Llama")
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--new", type=int, default=64, help="with --classes: tokens of an answer at most (64)")
    parser.add_argument("-t", "--threads", type=int, default=available_threads())
    args = parser.parse_args()
    args.model = choose_model(args.model).absolute()
    return args


def mixed_job(args: argparse.Namespace, turn: int) -> Job:
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
    return Job(str(args.model), args.threads, args.at_once, prompts, ids, [each.max_tokens for each in requests])


def chat_job(args: argparse.Namespace, at_once: int) -> Job:
    """Returns 16 questions, after two that warm up."""
    questions = [f"Name {n} things that one finds in a {place}." for n, place in enumerate(PLACES.split(), start=3)]
    questions += ["Why is the sky blue?", "Why is the sea salty?"]
    return Job(str(args.model), args.threads, at_once, questions, [], [args.new] * len(questions))


def measure(python: str | Path, name: str, job: Job) -> dict[str, float | None]:
    """Returns tokens/s, also per second of CPU time, which other programs change little, seconds to load and to the
    first answer, and percentiles of TTFT and of the time between two pieces of a text in milliseconds."""
    import numpy as np

    command, given = [python, __file__, "--child", name], json.dumps(asdict(job))
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr}")
    found, each = json.loads(done.stdout.splitlines()[-1])
    streams = [Stream(**stream) for stream in each]
    if name not in CLASSES and any(s.n_tokens != n for s, n in zip(streams, job.n_new, strict=False)):
        raise SystemExit(f"{name} has made other numbers of tokens than were asked for")
    seconds = max(stream.pieces[-1] for stream in streams) - min(stream.sent for stream in streams)
    n_tokens = sum(stream.n_tokens for stream in streams)
    times = {
        "ttft": np.array([stream.pieces[0] - stream.sent for stream in streams]),
        "gap": np.concatenate([np.diff(stream.pieces) for stream in streams]),
    }
    percentiles = {
        f"{key}_p{p}": 1000 * float(np.percentile(values, p)) if len(values) else None
        for key, values in times.items() for p in (50, 95)
    }  # fmt: skip
    return {"tokens_per_second": n_tokens / seconds, "per_cpu": n_tokens / found["cpu_s"], **found, **percentiles}


if __name__ == "__main__":
    main()
