#!/usr/bin/env python3
"""Batch jobs: their speed compared with the engine, and a million lines of input.

throughput: 300 prompts by `BatchInferenceEngine.generate` and by a job (worker process, ledger, files), alternately.
Loading and freeing the model does not count.
input: a file of a million requests. Prints the time to the first result and the memory of the command, and the time and
peak memory of reading the whole file into a ledger.

.venv/bin/python scripts/bench_jobs.py throughput|input [--repeats 3] [-m model.gguf]
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import tempfile
import time
from pathlib import Path
from random import Random

import psutil
from measuring import Comparison, script_arguments
from server_process import ChildProcess

from cppbatch.bench.prompts import random_text
from cppbatch.bench.report import Column
from cppbatch.cluster.deployment import Deployment
from cppbatch.config import EngineConfig
from cppbatch.engine.engine import BatchInferenceEngine
from cppbatch.engine.params import SamplingParams
from cppbatch.jobs.file_job import FileJob, open_job
from cppbatch.jobs.input.format import detect_input_format
from cppbatch.jobs.input.reader import InputReader
from cppbatch.jobs.journal import Journal
from cppbatch.jobs.ledger import Ledger
from cppbatch.jobs.request_order import chunks
from cppbatch.models.pull import choose_model
from cppbatch.server.api.batches.handler import URLS
from cppbatch.server.api.batches.offline import OfflineJob, run_offline
from cppbatch.server.settings import ServerSettings

N_TOKENS = 32
N_LINES = 1_000_000


def prompts() -> list[str]:
    """Returns 300 prompts of 8 to 20 tokens."""
    return [f"{random_text(Random(i), 6 + i % 13)}\n\n" for i in range(300)]


def by_engine(config: EngineConfig) -> float:
    """Returns tokens/s."""
    params = SamplingParams(max_tokens=N_TOKENS, temperature=0, ignore_eos=True)
    with BatchInferenceEngine(config) as engine:
        began = time.perf_counter()
        results = engine.generate(prompts(), params)
        seconds = time.perf_counter() - began
    return sum(len(result.tokens) for result in results) / seconds


def by_job(config: EngineConfig, folder: Path) -> float:
    """Returns tokens/s from the loaded model to the last result on disk."""
    source, out = folder / "in.jsonl", folder / "out.jsonl"
    fields = {"max_tokens": N_TOKENS, "temperature": 0, "ignore_eos": True}
    source.write_text("".join(json.dumps({"prompt": prompt, **fields}) + "\n" for prompt in prompts()))
    job = FileJob(input_format=detect_input_format(source), output=out, errors=folder / "errors.jsonl")
    began = 0.0

    def start() -> None:
        nonlocal began
        began = time.time()

    with InputReader(job.input_format, URLS) as reader:
        journal = open_job(job, config.model_path, overwrite=True, say=print)
        offline = OfflineJob(job, journal, reader)
        assert asyncio.run(run_offline(config, Deployment(), offline, ServerSettings(), started=start))
        assert (journal.n_completed, journal.n_failed) == (len(prompts()), 0)
        journal.close()
    return offline.n_tokens / (out.stat().st_mtime - began)


def throughput(config: EngineConfig, turns: int) -> None:
    """Prints the medians of both and their ratio."""
    with tempfile.TemporaryDirectory() as folder:
        ways = {"engine": lambda: by_engine(config), "job": lambda: by_job(config, Path(folder))}
        found = Comparison(ways).measure(turns, lambda name, turn: {"speed": ways[name]()})
    print(found.table([Column("speed", "tokens/s")], {"speed": "of the engine"}, digits=3))


def write_million_requests(path: Path) -> None:
    """Writes a file with a million requests of about 180 bytes each."""
    with path.open("w") as file:
        for i in range(N_LINES):
            message = {"role": "user", "content": f"Question {i} about the history of maps?"}
            body = {"messages": [message], "max_tokens": 4}
            line = {"custom_id": f"request-{i}", "method": "POST", "url": "/v1/chat/completions", "body": body}
            file.write(json.dumps(line) + "\n")


def first_result(config: EngineConfig, source: Path, folder: Path) -> None:
    """Runs the command until the first result and 20 s longer."""
    out = folder / "out.jsonl"
    command = [sys.executable, "-m", "cppbatch", "batch", str(source), "-o", str(out), "-m", config.model_path]
    began = time.perf_counter()
    with ChildProcess(command) as process:
        while not (out.exists() and out.stat().st_size):
            time.sleep(0.02)
        seconds = time.perf_counter() - began
        time.sleep(20)
        reader = psutil.Process(process.pid)
        print(f"first result after {seconds:.1f} s; the reader's memory {reader.memory_info().rss / 2**20:.0f} MiB")


def read_all(source: Path, folder: Path) -> None:
    """Reads the file into a ledger in this process, and prints the time and the peak memory."""
    journal = Journal(Ledger(folder / "job"), folder / "all.jsonl", folder / "errors.jsonl")
    began = time.perf_counter()
    with InputReader(detect_input_format(source), URLS) as reader:
        n = sum(len(journal.register(window)) for window in chunks(reader))
    seconds, most = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    journal.close()
    size = (folder / "job").stat().st_size / 2**20
    print(f"{n} lines into a ledger of {size:.0f} MiB in {seconds:.1f} s; most memory {most:.0f} MiB", flush=True)


def big_input(config: EngineConfig) -> None:
    """Measures reading the whole file, and the time to the first result."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = folder / "in.jsonl"
        write_million_requests(source)
        print(f"{source.stat().st_size / 2**20:.0f} MiB of input")
        read_all(source, folder)
        first_result(config, source, folder)


def main() -> None:
    """Runs one of the two measurements."""
    parser = script_arguments(__doc__, turns=3)
    parser.add_argument("what", choices=["throughput", "input"])
    args = parser.parse_args()
    config = EngineConfig(model_path=str(choose_model(args.model)))
    if args.what == "throughput":
        throughput(config, args.turns)
    else:
        big_input(config)


if __name__ == "__main__":
    main()
