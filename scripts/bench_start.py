#!/usr/bin/env python3
"""Seconds from the start of `cppbatch serve` to the first token of an answer, its parts, and llama-server beside it.

.venv/bin/python scripts/bench_start.py -m model.gguf [--repeats 7] [--llama-server PATH] [-- more flags of serve]

Both servers start alternately, with the same number of sequences and KV cells. The first start of each is left out: it
brings the files into the file cache, and finds out what is cached about the model. The parts are measured in processes
of their own, one part after the other; in a server those of the worker run beside those of the server process.
"""

from __future__ import annotations

import argparse
import http.client
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

TIMEOUT_S = 120
BODY = json.dumps({"prompt": "Hello", "max_tokens": 4, "stream": True})


def first_token(command: list[str]) -> float:
    """Returns the seconds of one start. The client repeats its request until the server answers."""
    from cppbatch.sizing.child_process import ChildProcess, free_port  # not in the processes that measure imports

    port = free_port()
    command = [*command, "--port", str(port)]
    began = time.perf_counter()
    with ChildProcess(command) as server:
        while time.perf_counter() - began < TIMEOUT_S and server.wait(0) is None:
            if answers(port):
                return time.perf_counter() - began
            time.sleep(0.01)
        raise SystemExit(f"no answer within {TIMEOUT_S} s; the command was: {' '.join(command)}")


def answers(port: int) -> bool:
    """Whether the server sends the first event of a stream."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    try:
        connection.request("POST", "/v1/completions", BODY, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status == 200 and answer.readline().startswith(b"data: {")
    except OSError:
        return False
    finally:
        connection.close()


class Parts:
    """Seconds of each part, in order."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._began = time.perf_counter()

    def end(self, name: str) -> None:
        """The part that has just ended."""
        now = time.perf_counter()
        self.seconds[name], self._began = now - self._began, now


def parts_of_server(model: Path) -> dict[str, float]:
    """Runs in a separate process: the part of `cppbatch serve` itself."""
    parts = Parts()
    import cppbatch.cli.plan_start as planning
    import cppbatch.cli.serve_command
    from cppbatch.config import EngineConfig

    parts.end("imports until the worker starts")
    config = EngineConfig(model_path=str(model))
    planning.plan_start(config, [], lambda one: [one], use_profile=True, memory_check=True, say=lambda line: None)
    parts.end("GGUF header, profile and memory check")
    import cppbatch.server.models.served  # noqa: F401

    parts.end("imports beside the worker")
    return parts.seconds


def parts_of_worker(model: Path) -> dict[str, float]:
    """Runs in a separate process: the part of a worker."""
    parts = Parts()
    import cppbatch.cluster.worker.main  # noqa: F401

    parts.end("imports")
    from cppbatch import SamplingParams
    from cppbatch.config import EngineConfig
    from cppbatch.engine.engine import BatchInferenceEngine
    from cppbatch.engine.runtime import load_model, make_context, open_runtime, repacks
    from cppbatch.engine.speculation.runtimes import uses_head
    from cppbatch.llama import Backend, find_prefix_sharing

    Backend.get()
    parts.end("llama.cpp's library")
    config = EngineConfig(model_path=str(model))
    repacks(config)
    parts.end("self-check and kernel times, cached")
    uses_head(config)
    parts.end("GGUF header")
    loaded = load_model(config)
    parts.end("model")
    assert loaded.vocab
    parts.end("vocabulary")
    context = make_context(config, loaded)
    parts.end("context")
    find_prefix_sharing(context, config)
    parts.end("probe of prefix sharing, cached")
    context.close()
    runtime = open_runtime(config, loaded)
    parts.end("")  # the context again, now the engine's
    del parts.seconds[""]
    engine = BatchInferenceEngine(config, runtime=runtime)
    engine.generate(["Hello"], SamplingParams(max_tokens=1))
    parts.end("first token")
    return parts.seconds


CHILDREN: dict[str, Callable[[Path], dict[str, float]]] = {"server": parts_of_server, "worker": parts_of_worker}


def print_parts(model: Path, repeats: int) -> None:
    """The median of each part."""
    for process in CHILDREN:
        command = [sys.executable, __file__, "--child", process, "-m", str(model)]
        found: list[dict[str, float]] = []
        for _ in range(1 + repeats):
            ended = subprocess.run(command, capture_output=True, text=True, check=True)
            found.append(json.loads(ended.stdout.splitlines()[-1]))
        print(f"{process} process:")
        for part in found[0]:
            print(f"  {median(each[part] for each in found[1:]):6.3f} s  {part}")


def main() -> None:
    """Prints each start, the medians, and the parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", type=Path, help="GGUF file; without it the default model")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--llama-server", type=Path, help="the program of llama.cpp to start alternately with ours")
    parser.add_argument("--child", choices=CHILDREN, help=argparse.SUPPRESS)
    parser.add_argument("rest", nargs="*", help="more arguments for `cppbatch serve`, after --")
    options = parser.parse_args()
    if options.child:
        print(json.dumps(CHILDREN[options.child](options.model)))
        return
    from cppbatch.config import EngineConfig, available_threads
    from cppbatch.models.pull import choose_model

    model = choose_model(options.model and str(options.model))
    config = EngineConfig(model_path=str(model))
    commands = {"cppbatch": [sys.executable, "-m", "cppbatch", "serve", "-m", str(model), *options.rest]}
    if options.llama_server:
        sizes = ["-c", str(config.n_ctx), "-np", str(config.n_parallel), "-t", str(available_threads())]
        commands["llama-server"] = [str(options.llama_server), "-m", str(model), *sizes]
    starts: dict[str, list[float]] = {name: [] for name in commands}
    for turn in range(1 + options.repeats):
        for name in commands if turn % 2 else reversed(commands):
            seconds = first_token(commands[name])
            if turn:
                starts[name].append(seconds)
    for name, of_each in starts.items():
        each = "  ".join(f"{seconds:.2f}" for seconds in of_each)
        print(f"{name}: start to first token {median(of_each):.2f} s (least {min(of_each):.2f}; {each})")
    if options.llama_server:
        ratios = [ours / theirs for ours, theirs in zip(*starts.values(), strict=True)]
        print(f"of llama-server's time: {median(ratios):.2f} ({'  '.join(f'{ratio:.2f}' for ratio in ratios)})")
    print_parts(model, options.repeats)


if __name__ == "__main__":
    main()
