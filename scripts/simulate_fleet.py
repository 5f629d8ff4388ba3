#!/usr/bin/env python3
"""Simulates a fleet of replicas: the real scheduler and routing rule over measured step times (docs/scale.md).

.venv/bin/python scripts/simulate_fleet.py --times scripts/step_times/h100-8b.json --replicas 100 --rate 4
.venv/bin/python scripts/simulate_fleet.py --replicas 1..50 --day 1200 --seconds 2400 --routing prefix
"""

from __future__ import annotations

import argparse
from pathlib import Path
from time import perf_counter
from typing import Any

import msgspec
import numpy as np
from fleet.conversations import Load
from fleet.result import FleetRun, fleet_result, results_table
from fleet.routing import ROUTINGS
from fleet.serve_autoscaling import Autoscaling
from fleet.simulation import FleetSimulation
from fleet.step_times import StepTimes, load_step_times

CPU_TIMES = Path(__file__).parent / "step_times" / "epyc-1-core-smollm2.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=Path, default=CPU_TIMES, help="step times of a replica, JSON")
    parser.add_argument("--replicas", default="10", help="a number, or the least and the most, like 1..50")
    parser.add_argument("--routing", default=",".join(ROUTINGS), help="names with commas: %(default)s")
    parser.add_argument("--cache-mib", type=int, default=1024, help="host memory of a replica for cached prefixes")
    parser.add_argument("--plot", type=Path, help="with 1..50: an image of replicas and load over time")
    parser.add_argument("--rate", type=float, default=0.4, help="requests a second for each replica (%(default)s)")
    parser.add_argument("--seconds", type=float, default=300.0, help="virtual seconds with arrivals (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--day", type=float, default=0.0, help="length of a day in seconds; 0: a constant rate")
    parser.add_argument("--load", default="{}", help="other fields of Load as JSON, like '{\"n_apps\": 20}'")
    parser.add_argument("--autoscaling", default="{}", help="fields of Autoscaling as JSON, with --replicas 1..50")
    parser.add_argument("--json", type=Path, help="where to write all figures")
    simulate(parser.parse_args())


def simulate(args: argparse.Namespace) -> None:
    """Simulates each routing rule, and prints a table."""
    times = load_step_times(args.times)
    least, _, most = args.replicas.partition("..")
    scaling = None
    if most:
        settings = {"min_replicas": int(least), "max_replicas": int(most), "target_ongoing_requests": times.n_parallel}
        scaling = msgspec.convert(settings | msgspec.json.decode(args.autoscaling), Autoscaling)
    load = make_load(args, n_replicas=int(most or least), times=times)
    print(f"{times.name}, {args.replicas} replicas, {load.rate:g} requests/s in the mean, {load.seconds:g} s\n")
    results, runs = [], {}
    for routing in args.routing.split(","):
        began = perf_counter()
        simulation = FleetSimulation(
            times, load, routing=routing, n_replicas=int(least), autoscaling=scaling,
            cache_bytes=args.cache_mib << 20,
        )  # fmt: skip
        runs[routing] = simulation.run()
        results.append(fleet_result(runs[routing], load, routing=routing, warm_up_s=load.seconds * 0.3))
        results[-1].wall_s = perf_counter() - began
    print(results_table(results))
    if scaling:
        for routing, run in runs.items():
            print_scaling(routing, run, times)
    if args.json:
        figures = {"times": times, "load": load, "autoscaling": scaling, "results": results}
        sizes = {routing: run.sizes for routing, run in runs.items()}
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(figures | {"sizes": sizes}), indent=1) + b"\n")
    if args.plot:
        plot_sizes(next(iter(runs.values())), load, scaling, args.plot)


def make_load(args: argparse.Namespace, *, n_replicas: int, times: StepTimes) -> Load:
    """The load of the options, for this number of replicas."""
    fields = {
        "rate": args.rate * n_replicas, "seconds": args.seconds, "seed": args.seed, "day_s": args.day,
        "max_tokens": times.stream_cells - 16,
    }  # fmt: skip
    return msgspec.convert(fields | msgspec.json.decode(args.load), Load)


def print_scaling(routing: str, run: FleetRun, times: StepTimes) -> None:
    """How far the replicas are behind the load."""
    now, _, ready, ongoing = np.array(run.sizes).T
    short = np.maximum(0, np.ceil(ongoing / times.n_parallel) - ready)
    print(
        f"\n{routing}: {run.replica_s / run.end_s:.1f} replicas in the mean, {ready.max():.0f} at most; "
        f"{(short > 0).mean():.0%} of the time fewer than {times.n_parallel} requests each need, by at most "
        f"{short.max():.0f}; from the decision to the replica {times.start_s:g} s"
    )
    lag = best_lag(now, ongoing / times.n_parallel, ready)
    print(f"{routing}: the number of replicas follows the load after {lag:.0f} s (best correlation)")


def best_lag(now: Any, wanted: Any, ready: Any) -> float:
    """Seconds by which `ready` is behind `wanted`, by their correlation."""
    lags = range(min(len(now) // 4, 600))
    scores = [np.corrcoef(wanted[: len(wanted) - lag], ready[lag:])[0, 1] for lag in lags]
    return float(np.nanargmax(scores)) * float(now[1] - now[0])


def plot_sizes(run: FleetRun, load: Load, scaling: Autoscaling | None, path: Path) -> None:
    """Replicas that the load needs and has, and the TTFT, over time."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    assert scaling
    now, _, ready, ongoing = np.array(run.sizes).T
    figure, (above, below) = plt.subplots(2, 1, figsize=(9, 5.5), sharex=True, height_ratios=(3, 2))
    above.plot(now, ongoing / scaling.target_ongoing_requests, color="0.6", lw=0.8, label="ongoing requests / target")
    above.plot(now, ready, color="tab:blue", label="replicas that take requests")
    above.set_ylabel("replicas")
    above.legend()
    arrived = np.array([request.arrived_at for request in run.finished])
    ttft = np.array([request.ttft for request in run.finished])
    edges = np.linspace(0, load.seconds, 61)
    bins = np.digitize(arrived, edges)
    for percentile, color in ((95, "tab:red"), (50, "tab:orange")):
        values = [np.percentile(ttft[bins == i], percentile) if (bins == i).any() else np.nan for i in range(1, 61)]
        below.plot((edges[1:] + edges[:-1]) / 2, values, color=color, label=f"TTFT p{percentile}")
    below.set_ylabel("TTFT, s")
    below.set_xlabel("seconds (simulated)")
    below.legend()
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    main()
