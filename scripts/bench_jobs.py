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

import msgspec
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

PARAMS = {"max_tokens": 32, "temperature": 0, "ignore_eos": True}
PROMPTS = [f"{random_text(Random(i), 6 + i % 13)}\n\n" for i in range(300)]  # of 8 to 20 tokens
N_LINES = 1_000_000


def by_engine(config: EngineConfig) -> float:
    """Returns tokens/s."""
    with BatchInferenceEngine(config) as engine:
        began = time.perf_counter()
        results = engine.generate(PROMPTS, msgspec.convert(PARAMS, SamplingParams))
        seconds = time.perf_counter() - began
    return sum(len(result.tokens) for result in results) / seconds


def by_job(config: EngineConfig, folder: Path) -> float:
    """Returns tokens/s from the loaded model to the last result on disk."""
    source, out, began = folder / "in.jsonl", folder / "out.jsonl", list[float]()
    source.write_text("".join(json.dumps({"prompt": prompt, **PARAMS}) + "\n" for prompt in PROMPTS))
    job = FileJob(input_format=detect_input_format(source), output=out, errors=folder / "errors.jsonl")
    with InputReader(job.input_format, URLS) as reader:
        journal = open_job(job, config.model_path, overwrite=True, say=print)
        offline, settings = OfflineJob(job, journal, reader), ServerSettings()
        assert asyncio.run(
            run_offline(config, Deployment(), offline, settings, started=lambda: began.append(time.time()))
        )
        assert (journal.n_completed, journal.n_failed) == (len(PROMPTS), 0)
        journal.close()
    return offline.n_tokens / (out.stat().st_mtime - began[0])


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


def main() -> None:
    """Runs one of the two measurements."""
    parser = script_arguments(__doc__, turns=3)
    parser.add_argument("what", choices=["throughput", "input"])
    args = parser.parse_args()
    config = EngineConfig(model_path=str(choose_model(args.model)))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if args.what == "throughput":
            ways = {"engine": lambda: by_engine(config), "job": lambda: by_job(config, folder)}
            found = Comparison(ways).measure(args.turns, lambda name, turn: {"speed": ways[name]()})
            print(found.table([Column("speed", "tokens/s")], {"speed": "of the engine"}, digits=3))
        else:
            source = folder / "in.jsonl"
            write_million_requests(source)
            print(f"{source.stat().st_size / 2**20:.0f} MiB of input")
            read_all(source, folder)
            first_result(config, source, folder)


if __name__ == "__main__":
    main()
