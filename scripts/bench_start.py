#!/usr/bin/env python3
"""Seconds from the start of `cppbatch serve` to the first token of an answer, its parts, and llama-server beside it.

.venv/bin/python scripts/bench_start.py -m model.gguf [--repeats 7] [--llama-server PATH] [-- more flags of serve]

Both servers start alternately, with the same number of sequences and KV cells. The first start of each is not counted:
it brings the files into the file cache, and finds out what is cached about the model. The parts are measured in
processes of their own, one part after the other; in a server those of the worker run beside those of the server.
"""

from __future__ import annotations

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
    from server_process import ChildProcess, free_port  # not in the processes that measure imports

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
        command = [sys.executable, __file__, "--child", process, str(model)]
        found: list[dict[str, float]] = []
        for _ in range(1 + repeats):
            ended = subprocess.run(command, capture_output=True, text=True, check=True)
            found.append(json.loads(ended.stdout.splitlines()[-1]))
        print(f"{process} process:")
        for part in found[0]:
            print(f"  {median(each[part] for each in found[1:]):6.3f} s  {part}")


def main() -> None:
    """Prints the medians of the starts, their ratios, and the parts."""
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(CHILDREN[sys.argv[2]](Path(sys.argv[3]))))
        return
    from measuring import Comparison, script_arguments
    from server_process import serve_command

    from cppbatch.bench.report import Column
    from cppbatch.config import EngineConfig, available_threads
    from cppbatch.models.pull import choose_model

    parser = script_arguments(__doc__, turns=7)
    parser.add_argument("--llama-server", type=Path, help="the program of llama.cpp to start alternately with ours")
    parser.add_argument("rest", nargs="*", help="more arguments for `cppbatch serve`, after --")
    args = parser.parse_args()
    model = choose_model(args.model)
    config = EngineConfig(model_path=str(model))
    commands = {"cppbatch": serve_command(model, *args.rest)}
    if args.llama_server:
        sizes = ["-c", str(config.n_ctx), "-np", str(config.n_parallel), "-t", str(available_threads())]
        commands["llama-server"] = [str(args.llama_server), "-m", str(model), *sizes]
    found = Comparison(commands).measure(
        args.turns, lambda name, turn: {"start": first_token(commands[name])}, uncounted=1
    )
    ratios = {"start": "of llama-server's time"} if args.llama_server else {}
    print(found.table([Column("start", "start to first token, s", 2)], ratios, base=list(commands)[-1]))
    print_parts(model, args.turns)


if __name__ == "__main__":
    main()
