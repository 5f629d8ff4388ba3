"""`cppbatch.Llama` beside llama_cpp.Llama: 16 threads, one thread, and the time to the first answer of a fresh process.

    python scripts/bench_llama_cpp_python.py [-m MODEL.gguf] [--turns 5] [--threads 16] [--max-tokens 64]
        [--compute-threads N]

Each figure is from a process of its own, both classes alternately; the table has medians, and the ratio of each turn.
The threads of llama_cpp.Llama wait for each other at a lock, since its object answers one request at a time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

CLASSES = ("llama_cpp", "cppbatch")
PLACES = "kitchen garden harbour library forest market school garage museum station bakery farm church office hotel zoo"
QUESTIONS = [f"Name {n} things that one finds in a {place}." for n, place in enumerate(PLACES.split(), start=3)]


def measure(which: str, model: str, n_threads: int, max_tokens: int, compute_threads: int) -> dict[str, float]:
    """Runs in a separate process: seconds of imports and loading, of the first answer, and tokens/s after it."""
    began = time.perf_counter()
    if which == "cppbatch":
        from cppbatch import Llama
    else:
        from llama_cpp import Llama  # type: ignore[no-redef]
    llm = Llama(model, n_ctx=1024, n_threads=compute_threads, n_threads_batch=compute_threads, verbose=False)
    loaded = time.perf_counter()
    lock = threading.Lock()

    def ask(question: str) -> int:
        messages = [{"role": "user", "content": question}]
        if which == "cppbatch":
            answer = llm.create_chat_completion(messages, max_tokens=max_tokens, temperature=0)
        else:
            with lock:
                answer = llm.create_chat_completion(messages, max_tokens=max_tokens, temperature=0)
        return int(answer["usage"]["completion_tokens"])

    n_first = ask("Why is the sky blue?")
    answered = time.perf_counter()
    with ThreadPoolExecutor(n_threads) as pool:
        n_tokens = sum(pool.map(ask, QUESTIONS))
    seconds = time.perf_counter() - answered
    return {
        "load": loaded - began, "first": answered - began, "first_tokens": n_first, "tokens_s": n_tokens / seconds,
    }  # fmt: skip


def in_a_process(which: str, model: str, n_threads: int, max_tokens: int, compute_threads: int) -> dict[str, float]:
    """`measure` in a fresh process."""
    command = [sys.executable, __file__, "--child", which, "-m", model]
    command += ["--threads", str(n_threads), "--max-tokens", str(max_tokens)]
    command += ["--compute-threads", str(compute_threads)]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(ended.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", type=Path)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--compute-threads", type=int, default=psutil.cpu_count(logical=False) or 1)
    parser.add_argument("--child", choices=CLASSES)
    given = parser.parse_args()
    if given.child:
        print(
            json.dumps(measure(given.child, str(given.model), given.threads, given.max_tokens, given.compute_threads))
        )
        return
    if given.model is None:
        from cppbatch import pull_default

        given.model = pull_default()
    for n_threads in (given.threads, 1):
        found: dict[str, list[dict[str, float]]] = {which: [] for which in CLASSES}
        for turn in range(given.turns):
            for which in CLASSES if turn % 2 else reversed(CLASSES):
                found[which].append(
                    in_a_process(which, str(given.model), n_threads, given.max_tokens, given.compute_threads)
                )
                each = ", ".join(f"{name} {value:.2f}" for name, value in found[which][-1].items())
                print(f"   turn {turn + 1}, {n_threads} threads, {which}: {each}", flush=True)
        for name, unit in (("tokens_s", "tokens/s"), ("first", "s to the first answer"), ("load", "s to load")):
            values = {which: [each[name] for each in found[which]] for which in CLASSES}
            pairs = zip(values["cppbatch"], values["llama_cpp"], strict=True)
            ratios = [ours / theirs if name == "tokens_s" else theirs / ours for ours, theirs in pairs]
            medians = ", ".join(f"{which} {statistics.median(values[which]):.2f}" for which in CLASSES)
            each = " ".join(f"{ratio:.2f}" for ratio in ratios)
            print(
                f"{n_threads:2} threads, {unit}: {medians}; ratio {statistics.median(ratios):.2f} ({each})", flush=True
            )


if __name__ == "__main__":
    main()
