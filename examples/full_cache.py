"""More requests than KV cells: the engine swaps sequences to host memory and resumes them. All requests finish.

.venv/bin/python examples/full_cache.py
"""

from __future__ import annotations

import argparse
from collections import Counter

from cppbatch import BatchInferenceEngine, SamplingParams, pull_default


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="GGUF file (the default model)")
    parser.add_argument("--requests", type=int, default=200, help="number of requests")
    parser.add_argument("--cells", type=int, default=512, help="KV cells, one for each token; a multiple of 256")
    args = parser.parse_args()

    with BatchInferenceEngine(args.model or pull_default(), n_ctx=args.cells, kv_layout="unified") as engine:
        expected = {}
        for i in range(args.requests):
            n = 56 if i % 8 < 2 and i < args.requests / 2 else 3  # some requests outgrow the cells
            params = SamplingParams(max_tokens=n, temperature=0, ignore_eos=True)
            expected[engine.add_request(f"{i}. In the middle of the ocean there is", params)] = n
        received: Counter[str] = Counter()
        finished = 0
        while engine.has_work:
            for event in engine.step():
                received[event.request_id] += len(event.tokens)
                finished += event.finish_reason is not None
                if event.finish_reason and finished % (args.requests // 8) == 0:
                    stats = engine.stats()
                    print(
                        f"{finished} finished, {stats.running} running, {stats.waiting} waiting, "
                        f"{stats.kv_cells_used} of {stats.kv_cells} cells, {stats.swaps} swaps"
                    )
        stats = engine.stats()
    complete = sum(received[request] == n for request, n in expected.items())
    print(f"{stats.prompt_tokens + received.total():,} tokens went through {stats.kv_cells} cells.")
    print(f"Preempted: {stats.swaps} times by swapping, {stats.recomputes} times by recomputation.")
    print(f"{complete} of {args.requests} requests have all their tokens.")


if __name__ == "__main__":
    main()
