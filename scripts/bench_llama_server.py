#!/usr/bin/env python3
"""cppbatch serve beside llama-server under the same load, alternately: tokens/s, TTFT, inter-token times, failures.

For each load llama-server first runs with unified cells and with a stream for each sequence, with and without flash
attention and with smaller cache types, and the fastest flags are kept. Then both servers run, and each turn measures
one after the other. The load comes from `cppbatch bench serve`, or from AIPerf (--aiperf), which makes prompts of its
own. Ratios are medians of the turns' ratios. --busy-core measures each turn again beside a process that keeps one core
busy. For the loads of speculative decoding (quote, json, code, job, free) llama-server's kinds of n-gram drafts are
tried as well, and with --clients 1,4,16 each load is measured with that many clients.

    .venv/bin/python scripts/bench_llama_server.py PEERS/llama-server [-m model.gguf] [--load mixed,fan-out] [--turns 3]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from cppbatch.bench.report import Spread, markdown_table, read_report
from cppbatch.bench.text_workloads import TEXT_WORKLOADS
from cppbatch.config import available_threads
from cppbatch.errors import CppBatchError, UnusableServer
from cppbatch.models.pull import choose_model
from cppbatch.sizing.child_process import ChildProcess, run_with_timeout, running_server

CPPBATCH = [sys.executable, "-m", "cppbatch"]
OURS, THEIRS = "cppbatch", "llama-server"
ALONE, BUSY = "alone", "beside a busy core"
BUSY_LOOP = "import time; end = time.monotonic() + {}\nwhile time.monotonic() < end: pass"

FIND_TURNS = 2

Urls = dict[str, str]
"""The address of each server by its label."""


@dataclass(frozen=True)
class Load:
    """A load: the servers' sizes and the flags of both generators."""

    n_requests: int
    bench_serve: str
    aiperf: str
    concurrency: int = 16
    sizes: str = "-np 16 -c 32768"
    """Of both servers."""
    ours: str = ""
    """More flags of `cppbatch serve`."""
    layouts: tuple[str, ...] = ("-kvu", "--no-kv-unified")
    """llama-server's, to try."""
    drafts: tuple[str, ...] = ()
    """llama-server's flags for drafts, to try with the best layout."""


ATTENTION = ("-fa off", "-fa on", "-fa on -ctk bf16 -ctv bf16", "-fa on -ctk q8_0 -ctv q8_0")
"""llama-server's, to try."""

NGRAM_DRAFTS = (
    "--spec-type ngram-simple",
    "--spec-type ngram-simple --spec-ngram-simple-size-n 4 --spec-ngram-simple-size-m 16",
    "--spec-type ngram-map-k --spec-ngram-map-k-size-n 4 --spec-ngram-map-k-size-m 16",
    "--spec-type ngram-mod --spec-ngram-mod-n-match 8 --spec-ngram-mod-n-min 4 --spec-ngram-mod-n-max 16",
    "--spec-type ngram-cache",
)


LOADS = {
    "mixed": Load(
        n_requests=48,
        bench_serve="--workload mixed",
        aiperf="--seq-dist 32,32:25;96,64:25;192,128:25;448,16:25",
    ),
    "fan-out": Load(
        n_requests=48,
        bench_serve="--workload fan-out",
        aiperf="--num-dataset-entries 1 --isl 256 --osl 32",
    ),
    "shared-prefix": Load(
        n_requests=48,
        bench_serve="--workload shared-prefix",
        aiperf="--num-prefix-prompts 1 --prefix-prompt-length 580 --isl 20 --osl 32",
    ),
    "full-cells": Load(
        n_requests=24,
        bench_serve="--workload fixed --prompt-tokens 64 --output-tokens 64",
        aiperf="--isl 64 --osl 64",
        concurrency=24,
        sizes="-np 24 -c 2048",
        ours="--kv-layout unified",
        layouts=("-kvu",),
    ),
    **{
        name: Load(
            n_requests=max(16, 16 * text.rounds), bench_serve=f"--workload {name}", aiperf="", drafts=NGRAM_DRAFTS
        )
        for name, text in TEXT_WORKLOADS.items()
    },
}


@dataclass(frozen=True)
class Figures:
    """One server in one turn. Times are in milliseconds; None if no request succeeded."""

    tokens_per_second: float
    ttft_p50: float | None
    ttft_p95: float | None
    inter_token_p50: float | None
    inter_token_p95: float | None
    inter_token_p99: float | None
    inter_token_longest: float | None
    tpot_p50: float | None
    tpot_p95: float | None
    failed: int
    requests: int


Turn = dict[str, Figures]
"""The figures of each server by its label."""

ROWS = {
    "output tokens/s": "tokens_per_second",
    "TTFT p50, ms": "ttft_p50",
    "TTFT p95, ms": "ttft_p95",
    "inter-token p50, ms": "inter_token_p50",
    "inter-token p95, ms": "inter_token_p95",
    "inter-token p99, ms": "inter_token_p99",
    "longest gap, ms": "inter_token_longest",
    "TPOT p50, ms": "tpot_p50",
    "TPOT p95, ms": "tpot_p95",
}


@dataclass(frozen=True)
class Generator:
    """Sends the requests of a load and measures the answers."""

    load: Load
    n_requests: int
    aiperf: Path | None
    """None: `cppbatch bench serve`."""
    tokenizer: Path
    """For AIPerf: a folder with a tokenizer in the format of Hugging Face."""
    end: float
    """The time after which no run may start, on the clock of `time.monotonic`."""

    def measure(self, urls: Urls, seed: int, n_requests: int | None = None) -> Turn:
        """Measures these servers one after the other, with the same prompts. Returns the figures by label."""
        n = n_requests or self.n_requests
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            if self.aiperf is None:
                return self._bench_serve(urls, seed, n, folder / "report.json")
            return {label: self._aiperf(self.aiperf, url, seed, n, folder / label) for label, url in urls.items()}

    def _bench_serve(self, urls: Urls, seed: int, n: int, file: Path) -> Turn:
        named = [word for label, url in urls.items() for word in ("--url", f"{label}={url}")]
        sizes = ["--requests", n, "--concurrency", self.load.concurrency, "--seed", seed, "--repeats", 1]
        self._run([*CPPBATCH, "bench", "serve", *named, *self.load.bench_serve.split(), *sizes, "--json", file])
        return {row["server"]: from_report(row) for row in read_report(file).rows}

    def _aiperf(self, program: Path, url: str, seed: int, n: int, folder: Path) -> Figures:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=10) as answer:
            model = json.load(answer)["data"][0]["id"]
        self._run([
            program, "profile", "--url", url, "--model", model, "--endpoint-type", "completions", "--streaming",
            "--tokenizer", self.tokenizer, "--use-server-token-count", "--use-legacy-max-tokens",
            "--extra-inputs", "ignore_eos:true", "--extra-inputs", "temperature:0", *self.load.aiperf.split(),
            "--request-count", n, "--concurrency", self.load.concurrency, "--random-seed", seed,
            "--workers-max", 1, "--record-processors", 1, "--ui", "none", "--no-gpu-telemetry", "--no-server-metrics",
            "--export-level", "summary", "--artifact-dir", folder,
        ])  # fmt: skip
        return from_aiperf(json.loads((folder / "profile_export_aiperf.json").read_bytes()))

    def _run(self, command: list[object]) -> None:
        done = run_with_timeout(list(map(str, command)), self.end - time.monotonic())
        if done.failure:
            raise UnusableServer(f"{' '.join(map(str, command))}: {done.failure}\n{done.output[-2000:]}")


def from_report(row: dict[str, Any]) -> Figures:
    """Returns the figures of a row of `cppbatch bench serve --json`."""

    def ms(key: str) -> float | None:
        spread: Spread | None = row[key]
        return spread.median if spread else None

    return Figures(
        row["output_tokens_per_second"].median,
        ms("ttft_ms_p50"),
        ms("ttft_ms_p95"),
        ms("inter_token_ms_p50"),
        ms("inter_token_ms_p95"),
        ms("inter_token_ms_p99"),
        ms("inter_token_ms_p100"),
        ms("tpot_ms_p50"),
        ms("tpot_ms_p95"),
        row["failed"],
        row["requests"],
    )


def from_aiperf(export: dict[str, Any]) -> Figures:
    """Returns the figures of AIPerf's summary; what is missing there was not measured.

    Its `inter_chunk_latency` is our inter-token time, its `inter_token_latency` our TPOT. A request that ends in an
    error after its first token counts as answered there; only answers with a usage have a length, so those are counted
    here.
    """

    def figure(name: str, key: str) -> float | None:
        return export[name][key] if name in export else None

    requests = sum(int(figure(name, "avg") or 0) for name in ("request_count", "error_request_count"))
    return Figures(
        figure("output_token_throughput", "avg") or 0.0,
        figure("time_to_first_token", "p50"),
        figure("time_to_first_token", "p95"),
        figure("inter_chunk_latency", "p50"),
        figure("inter_chunk_latency", "p95"),
        figure("inter_chunk_latency", "p99"),
        figure("inter_chunk_latency", "max"),
        figure("inter_token_latency", "p50"),
        figure("inter_token_latency", "p95"),
        failed=requests - int(figure("output_sequence_length", "count") or 0),
        requests=requests,
    )


@contextlib.contextmanager
def busy_core(seconds: float) -> Iterator[None]:
    """A process that keeps one core busy, until the block or the time ends."""
    with ChildProcess([sys.executable, "-c", BUSY_LOOP.format(seconds)]):
        yield


def common_flags(load: Load, threads: int) -> list[str]:
    """Returns llama-server's flags without its KV layout, flash attention and cache types."""
    return [*load.sizes.split(), "-t", str(threads), "--cache-ram", "0", "--no-ui"]


def find_best(speeds_of: Callable[[list[str]], dict[str, float]], load: Load, known: str | None) -> str:
    """Finds llama-server's fastest flags: its layout and attention first, then its drafts, if the load has any.

    `speeds_of`: measures llama-server with each of some flags, and returns its tokens/s by flags. `known`: the flags to
    begin with. Returns the flags; with drafts the best ones, whether or not they are faster than without.
    """
    best = known or fastest(speeds_of([f"{layout} {attention}" for layout in load.layouts for attention in ATTENTION]))
    if load.drafts and "--spec-type" not in best:
        speeds = speeds_of([best, *(f"{best} {drafts}" for drafts in load.drafts)])
        best = fastest({flags: speed for flags, speed in speeds.items() if flags != best})
    return best


def fastest(speeds: dict[str, float]) -> str:
    return max(speeds, key=speeds.__getitem__)


def measure_commands(generator: Generator, commands: dict[str, list[str | Path]], n_requests: int) -> dict[str, float]:
    """Starts llama-server with each command and measures all of them alternately. Returns the tokens/s by flags."""
    with contextlib.ExitStack() as servers:
        urls = {flags: servers.enter_context(running_server(command)).url for flags, command in commands.items()}
        turns = [generator.measure(urls, seed, n_requests) for seed in range(FIND_TURNS)]
    speeds = {flags: median(turn[flags].tokens_per_second for turn in turns) for flags in commands}
    found = ", ".join(f"`{flags}` {speed:.0f}" for flags, speed in speeds.items())
    print(f"llama-server, tokens/s by its flags: {found}.", flush=True)
    return speeds


def measure_turns(generator: Generator, urls: Urls, states: list[str], n_turns: int) -> dict[str, list[Turn]]:
    """Returns the turns of each state. Servers and states change places from turn to turn."""
    turns: dict[str, list[Turn]] = {state: [] for state in states}
    for i in range(n_turns):
        order = slice(None, None, -1 if i % 2 else 1)
        for state in states[order]:
            with busy_core(generator.end - time.monotonic()) if state == BUSY else contextlib.nullcontext():
                turn = generator.measure(
                    dict(list(urls.items())[order]), FIND_TURNS + i * len(states) + (state == BUSY)
                )
                turns[state].append(turn)
    return turns


def table(load: str, turns: dict[str, list[Turn]]) -> str:
    """Returns a row for each figure: the medians of both servers, and the median of the turns' ratios."""
    rows: list[list[str]] = []
    speeds: dict[tuple[str, str], list[float]] = {}
    for state, measured in turns.items():
        name = load if state == ALONE else f"{load} {state}"
        of_server = {label: [turn[label] for turn in measured] for label in (OURS, THEIRS)}
        for title, key in ROWS.items():
            ours, theirs = ([getattr(figures, key) for figures in of_server[label]] for label in (OURS, THEIRS))
            rows.append([f"{name}: {title}", middle(ours), middle(theirs), ratio(ours, theirs)])
        failed = [f"{sum(f.failed for f in each)} of {sum(f.requests for f in each)}" for each in of_server.values()]
        rows.append([f"{name}: failed requests", *failed, ""])
        speeds |= {(label, state): [f.tokens_per_second for f in each] for label, each in of_server.items()}
    if BUSY in turns:
        kept = [ratio(speeds[label, BUSY], speeds[label, ALONE]) for label in (OURS, THEIRS)]
        rows.append([f"{load}: tokens/s {BUSY} / {ALONE}", *kept, ""])
    return markdown_table(["", OURS, THEIRS, "ratio (range)"], rows)


def middle(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{median(known):,.1f}" if known else "-"


def ratio(ours: Sequence[float | None], theirs: Sequence[float | None]) -> str:
    """Returns the median of the turns' ratios and their range."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True) if a and b]
    return f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else "-"


def write_tokenizer(model: Path, folder: Path) -> Path:
    """Writes the model's byte-level vocabulary in the format of Hugging Face into `folder` and returns that."""
    from gguf import GGUFReader
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    fields = GGUFReader(model).fields
    if fields["tokenizer.ggml.model"].contents() != "gpt2":
        raise UnusableServer(f"{model} has no byte-level vocabulary that could be written for AIPerf; give --tokenizer")
    tokens, merges = (fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "merges"))
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab, [tuple(pair.split(" ")) for pair in merges]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return folder


def compare(args: argparse.Namespace, name: str, clients: int | None, tokenizer: Path) -> None:
    """Prints the comparison under one load. `clients`: None: as the load says."""
    load, ours = LOADS[name], choose_model(args.model)
    if args.aiperf and not load.aiperf:
        raise UnusableServer(f"--load {name} is of texts, which only `cppbatch bench serve` sends; leave out --aiperf")
    if clients:
        load = replace(load, concurrency=clients)
    theirs = args.their_model or ours
    generator = Generator(load, args.requests or load.n_requests, args.aiperf, tokenizer, args.end)
    n_few = max(load.concurrency, generator.n_requests // 2)

    def speeds_of(tried: list[str]) -> dict[str, float]:
        common = common_flags(load, args.threads)
        tries: dict[str, list[str | Path]] = {
            flags: [args.llama_server, "-m", theirs, *common, *flags.split()] for flags in tried
        }
        return measure_commands(generator, tries, n_few)

    flags = find_best(speeds_of, load, args.theirs)
    print(f"Kept: `{flags}`\n", flush=True)
    commands: dict[str, list[str | Path]] = {
        OURS: [*CPPBATCH, "serve", "-m", ours, *load.sizes.split(), *load.ours.split(), *args.ours.split()],
        THEIRS: [args.llama_server, "-m", theirs, *common_flags(load, args.threads), *flags.split()],
    }
    with contextlib.ExitStack() as servers:
        urls = {label: servers.enter_context(running_server(command)).url for label, command in commands.items()}
        turns = measure_turns(generator, urls, [ALONE, BUSY] if args.busy_core else [ALONE], args.turns)
    files = ours.stem if theirs == ours else f"{ours.stem}; llama-server: {theirs.stem}"
    by = "AIPerf" if args.aiperf else "cppbatch bench serve"
    print(
        f"{files}; {by}, {generator.n_requests} requests, {load.concurrency} at once, medians of {args.turns} turns:\n"
    )
    print(table(name, turns), end="\n\n", flush=True)


def main() -> None:
    """Prints a table for each load."""
    args = _arguments()
    try:
        with tempfile.TemporaryDirectory() as folder:
            tokenizer = args.tokenizer
            if args.aiperf and not tokenizer:
                tokenizer = write_tokenizer(choose_model(args.model), Path(folder))
            for name in args.load:
                for clients in args.clients:
                    compare(args, name, clients, tokenizer)
    except CppBatchError as error:
        sys.exit(f"bench_llama_server.py: {error}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("llama_server", type=Path, help="the program llama-server")
    parser.add_argument("-m", "--model", help="GGUF file of both servers (the default model)")
    parser.add_argument("--their-model", type=Path, help="another GGUF file for llama-server")
    usual = [name for name, load in LOADS.items() if not load.drafts]
    parser.add_argument(
        "--load", type=lambda names: names.split(","), default=usual, metavar="NAME,NAME...",
        help=f"some of {', '.join(LOADS)} ({','.join(usual)})",
    )  # fmt: skip
    parser.add_argument(
        "--clients", type=lambda counts: [int(count) for count in counts.split(",")], default=[None], metavar="N,N...",
        help="measure each load with these numbers of clients (as the load says)",
    )  # fmt: skip
    parser.add_argument("--requests", type=int, help="in each turn (48; full-cells: 24; texts: 16, job: 48)")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--busy-core", action="store_true", help="measure beside a busy core too")
    parser.add_argument("--aiperf", type=Path, help="the program aiperf (pip install aiperf), instead of bench serve")
    parser.add_argument("--tokenizer", type=Path, help="folder with a tokenizer for AIPerf (the model's own)")
    parser.add_argument("-t", "--threads", type=int, default=available_threads(), help="llama-server's threads")
    parser.add_argument("--minutes", type=float, default=60, help="for everything (60)")
    parser.add_argument(
        "--theirs", metavar="FLAGS",
        help='flags known to be the best: --theirs="-kvu -fa on"; without --spec-type in them, drafts are still tried',
    )  # fmt: skip
    parser.add_argument("--ours", default="", metavar="FLAGS", help='more flags of cppbatch serve: --ours="-t 1"')
    args = parser.parse_args()
    if unknown := [name for name in args.load if name not in LOADS]:
        parser.error(f"--load {','.join(unknown)}: write some of {', '.join(LOADS)}")
    args.end = time.monotonic() + 60 * args.minutes
    return args


if __name__ == "__main__":
    main()
