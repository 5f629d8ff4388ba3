"""Times placements of a model that a device cannot hold, whole and alternately, and compares the chosen one with them.

    .venv/bin/python scripts/bench_placement.py -m MODEL.gguf --rpc 127.0.0.1:50052 --device-memory 200
    GGML_VK_VISIBLE_DEVICES=0 .venv/bin/python scripts/bench_placement.py -m MODEL.gguf --device-memory 200

The first device of the estimate is used as one with this many MiB (--fit-target leaves the rest free).
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from msgspec.structs import replace

from cppbatch.bench.tune.measurement import MeasurementTask, measure_in_child
from cppbatch.config import EngineConfig
from cppbatch.sizing.estimate import estimate_memory
from cppbatch.sizing.placement import Placed, placement_flags, placements

MIB = 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description="Times placements of a model that a device cannot hold.")
    parser.add_argument("-m", "--model", type=Path, required=True)
    parser.add_argument("--rpc", default="", help="Endpoint of an RPC worker that plays the device.")
    parser.add_argument("--device-memory", type=int, required=True, help="MiB of the device that may be used.")
    parser.add_argument("-B", "--batch-sizes", default="1,16")
    parser.add_argument("-c", "--ctx-size", type=int, default=4096)
    parser.add_argument("-t", "--threads", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.5, help="Of decoding, for each measurement.")
    arguments = parser.parse_args()
    for n in map(int, arguments.batch_sizes.split(",")):
        config = EngineConfig(
            str(arguments.model),
            n_parallel=n,
            n_ctx=arguments.ctx_size,
            n_threads=arguments.threads,
            rpc=(arguments.rpc,) if arguments.rpc else (),
            prefer="latency" if n == 1 else "throughput",
            prefix_cache=False,
            spec="off",
        )
        (device, *_) = estimate_memory([config]).devices
        margin = max(0, device.free // MIB - arguments.device_memory)
        config = replace(config, fit_target=(margin,))
        compare(config, list(placements([config], lambda one: [one], [device], {"n_ubatch"})), arguments)


def compare(config: EngineConfig, found: list[Placed], arguments: argparse.Namespace) -> None:
    """Prints the measured and expected tokens/s of each placement, the chosen one first."""
    tried = {each.config: each.speeds.full for each in found}
    chosen = found[0].config
    print(f"\nB = {config.n_parallel}, --prefer {config.prefer}")
    measured: dict[EngineConfig, list[float]] = {each: [] for each in tried}
    for _ in range(arguments.repeats):
        for each in tried:
            result = measure_in_child(MeasurementTask(config=each, seconds=arguments.seconds), 300)
            if result.error:
                print(f"{placement_flags(each)}: {result.error}")
            else:
                measured[each].append(result.tokens_per_s)
    medians = {each: statistics.median(speeds) for each, speeds in measured.items() if speeds}
    for each, speed in medians.items():
        print(f"  {placement_flags(each):60} {speed:8.2f} tokens/s measured, {tried[each]:8.2f} expected")
    print(f"  the chosen one has {medians[chosen] / max(medians.values()):.3f} of the best")


if __name__ == "__main__":
    main()
