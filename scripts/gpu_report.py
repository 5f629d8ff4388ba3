#!/usr/bin/env python3
"""Runs all benchmarks that matter on a GPU in a few minutes and writes one Markdown report.

llama.cpp's own benchmark, the engine with the same sizes, sampling on the host and on the device, servers under load,
the time of a step by phase, and tests. Each part is a child process with a time limit. If one fails, the
report contains its output, and the other parts run. The report file is complete after every part.

-m takes GGUF files, or shapes for which a random-weight file is written first. --peers is a folder with llama.cpp's
bin/llama-batched-bench and bin/llama-server, built for the same device. It also runs without a GPU (-ngl 0 --small).

    .venv/bin/python scripts/gpu_report.py -m 8B --peers peers -o gpu-report.md
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from measuring import markdown_table
from server_process import ChildProcess, CommandResult, free_port, run_with_timeout

from cppbatch.bench.report import Column, Report, Spread, format_cell
from cppbatch.models.find import models_folder
from cppbatch.models.pull import DEFAULT
from cppbatch.models.synthetic import SHAPES
from cppbatch.sizing.machine import Machine

Command = Sequence[object]
"""The words of a command; each is converted by `str`."""

ROOT = Path(__file__).resolve().parent.parent
PYTHON = sys.executable
CPPBATCH = [PYTHON, "-m", "cppbatch"]
MIN_SECONDS = 3  # with less time left, a part is not started
OUTPUT_LINES = 30  # shown of a failed part

PRINT_MACHINE = (
    "import msgspec; from cppbatch.sizing.machine import this_machine; "
    "print(msgspec.json.encode(this_machine()).decode())"
)


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measurements."""

    batch_sizes: tuple[int, ...] = (1, 8, 16, 32, 64)
    sampled: tuple[int, ...] = (16, 32, 64)
    """Batch sizes for which host and device sampling are compared."""
    prompt: int = 128
    new: int = 64
    repeats: int = 3
    requests: int = 48
    concurrency: int = 16
    cells: int = 65_536
    """n_ctx of the servers."""
    tests: tuple[str, ...] = ("test_llama_context", "test_llama_memory", "test_device_sampling", "test_engine_native")


SMALL = Sizes(
    batch_sizes=(1, 2), sampled=(2,), prompt=16, new=8, repeats=1, requests=4, concurrency=2, cells=4096,
    tests=("test_llama_memory",),
)  # fmt: skip


class Page:
    """The report and its time limit."""

    def __init__(self, path: Path, seconds: float) -> None:
        self.path = path
        self.failed = 0
        self._began = time.monotonic()
        self._end = self._began + seconds
        self._blocks: list[str] = []

    def add(self, block: str) -> None:
        """Appends a heading, a paragraph or a table."""
        self._blocks.append(block)
        self.path.write_text("\n\n".join(self._blocks) + "\n", "utf-8")

    def add_failure(self, why: str, output: str = "") -> None:
        """Appends an error and the end of the output."""
        self.failed += 1
        self.add(f"**Failed**: {why}.")
        if output.strip():
            self.add(as_code("\n".join(output.strip().splitlines()[-OUTPUT_LINES:])))

    def seconds_left(self) -> float:
        return self._end - time.monotonic()

    def seconds_elapsed(self) -> float:
        return time.monotonic() - self._began

    def part(self, title: str, command: Command, seconds: float, show: Callable[[CommandResult], str]) -> None:
        """Adds a section with this title, as `run`."""
        self.add(f"### {title}")
        self.run(title, command, seconds, show)

    def run(self, title: str, command: Command, seconds: float, show: Callable[[CommandResult], str]) -> str | None:
        """Adds a command and its result, formatted by `show`. Returns that; None if the command failed."""
        if self.seconds_left() < MIN_SECONDS:
            self.add_failure("not begun, because the time for the whole report (--minutes) is over")
            return None
        print(f"{self.seconds_elapsed():4.0f} s  {title}", file=sys.stderr, flush=True)
        self.add(shell_line(command))
        outcome = run_with_timeout(
            list(map(str, command)), min(seconds, self.seconds_left()), env=environment(), cwd=ROOT
        )
        if outcome.failure:
            self.add_failure(outcome.failure, outcome.output)
            return None
        try:
            shown = show(outcome)
        except (OSError, ValueError, LookupError) as error:  # the command succeeded, but its result is unreadable
            self.add_failure(f"its result cannot be read: {error}", outcome.output)
            return None
        self.add(f"{shown}\n\nTook {outcome.seconds:.1f} s.")
        return shown


def as_code(text: str) -> str:
    return f"```text\n{text.replace('```', chr(39) * 3)}\n```"


def shell_line(command: Command) -> str:
    """Formats a command as in a shell."""
    return as_code(shlex.join("python" if word == PYTHON else str(word) for word in command))


def environment() -> dict[str, str]:
    """Returns an environment in which child processes import this checkout's package."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def numbers(values: tuple[int, ...]) -> str:
    return ",".join(map(str, values))


@dataclass(frozen=True)
class Measurement:
    """Measurements of one model."""

    page: Page
    sizes: Sizes
    model: Path
    gpu_layers: int
    peers: Path | None
    folder: Path
    """For files that the child processes write."""

    def all(self) -> None:
        """Runs all parts; parts to be compared run one after the other."""
        self.page.add(f"## {self.model.stem}")
        self.batched_bench()
        self.engine()
        self.sampling()
        self.servers()

    def batched_bench(self) -> None:
        sizes, binary = self.sizes, self._peer("llama-batched-bench")
        for name, flags in (("unified", ["-kvu"]), ("per-sequence", [])):
            title = f"llama-batched-bench, {name}"
            if not binary:
                self.page.add(f"### {title}\n\n{self._missing('llama-batched-bench')}")
                continue
            cells = max(sizes.batch_sizes) * (sizes.prompt + sizes.new)
            command = [
                binary, "-m", self.model, "-ngl", self.gpu_layers, "-c", cells, "-b", 2048, "-ub", 512, "-fa", "on",
                "-npp", sizes.prompt, "-ntg", sizes.new, "-npl", numbers(sizes.batch_sizes), *flags,
            ]  # fmt: skip
            self.page.part(title, command, 60, its_table)

    def engine(self) -> None:
        command, show = self._throughput(self.sizes.batch_sizes, "unified,per-sequence", "greedy", "backend")
        self.page.part("The engine, and where the time of a step goes", command, 150, show)

    def sampling(self) -> None:
        for where in ("host", "backend"):
            command, show = self._throughput(self.sizes.sampled, "unified", "defaults", where)
            self.page.part(f"Sampling: {where}", command, 75, show)

    def servers(self) -> None:
        self.page.add("### Servers under load")
        sizes, port = self.sizes, {name: free_port() for name in ("ours", "llama-server", "llama-server-bs")}
        common = ["-m", self.model, "-ngl", self.gpu_layers, "-c", sizes.cells, "-np", sizes.concurrency, "-fa", "on"]
        commands: dict[str, Command] = {"ours": [*CPPBATCH, "serve", "--port", port["ours"], *common]}
        if binary := self._peer("llama-server"):
            plain = [binary, *common, "--cache-ram", 0, "--no-ui", "--port"]
            commands["llama-server"] = [*plain, port["llama-server"]]
            commands["llama-server-bs"] = [*plain, port["llama-server-bs"], "--backend-sampling"]
        else:
            self.page.add(self._missing("llama-server"))
        with ExitStack() as stack:
            urls = [
                f"{name}=http://127.0.0.1:{port[name]}"
                for name, command in commands.items()
                if self._start(stack, name, command, port[name])
            ]
            if urls:
                self._load(urls)

    def _start(self, stack: ExitStack, name: str, command: Command, port: int) -> bool:
        """Starts a server. Returns whether it is ready; if not, the report gives the reason."""
        self.page.add(shell_line(command))
        try:
            server = stack.enter_context(ChildProcess(list(map(str, command)), env=environment(), cwd=ROOT))
        except OSError as error:
            self.page.add_failure(f"{name} could not be started: {error}")
            return False
        problem = server.wait_for(f"http://127.0.0.1:{port}/health", min(60, self.page.seconds_left()))
        if problem:
            self.page.add_failure(f"{name} {problem}", server.output())
        return not problem

    def _load(self, urls: list[str]) -> None:
        sizes, file = self.sizes, self.folder / "serve.json"
        named = [word for url in urls for word in ("--url", url)]
        command = [
            *CPPBATCH, "bench", "serve", *named, "--workload", "mixed", "--requests", sizes.requests,
            "--concurrency", sizes.concurrency, "--repeats", sizes.repeats, "--json", file,
        ]  # fmt: skip
        self.page.run("Servers under load", command, 120, lambda _: markdown(read_report(file)))

    def _throughput(
        self, batch_sizes: tuple[int, ...], layouts: str, kinds: str, sampling: str
    ) -> tuple[Command, Callable[[CommandResult], str]]:
        sizes, file = self.sizes, self.folder / f"{kinds}-{sampling}.json"
        command = [*CPPBATCH, "bench", "throughput", "-m", self.model, "-ngl", self.gpu_layers]
        command += ["-B", numbers(batch_sizes), "--layouts", layouts, "--flash-attns", "on", "--sampling", sampling]
        command += ["--kinds", kinds, "--prompt-tokens", sizes.prompt, "--new-tokens", sizes.new]
        command += ["--repeats", sizes.repeats, "--json", file]
        return command, lambda _: with_phases(read_report(file))

    def _peer(self, name: str) -> Path | None:
        folders = [self.peers / "bin", self.peers] if self.peers else []
        found = shutil.which(name, path=os.pathsep.join(map(str, folders))) if folders else None
        return Path(found).resolve() if found else None

    def _missing(self, name: str) -> str:
        where = f"there is no {name} in {self.peers} or its bin folder" if self.peers else "--peers was not given"
        return f"{name} was not measured: {where}."


def read_report(path: Path) -> Report:
    """Reads a file written by `Report.write_json`. Raises OSError, or `msgspec.DecodeError` for another file."""
    report = msgspec.json.decode(path.read_bytes(), type=Report)
    return msgspec.structs.replace(report, rows=[_spreads(row) for row in report.rows])


def _spreads(value: Any) -> Any:
    """Restores the `Spread`s in a decoded value: the objects with exactly these three fields."""
    if not isinstance(value, dict):
        return value
    if value.keys() == set(Spread.__struct_fields__):
        return Spread(**value)
    return {key: _spreads(each) for key, each in value.items()}


def markdown(report: Report) -> str:
    """Returns a report's table and notes. Servers have many figures, so they become columns."""
    head = [column.title for column in report.columns]
    body = [[format_cell(row.get(column.key), column.digits) for column in report.columns] for row in report.rows]
    if report.kind == "serve":
        body = [list(line) for line in zip(head, *body, strict=True)]
        head = ["", *(row["server"] for row in report.rows)]
    notes = "\n".join(f"- {note}" for note in report.notes)
    title = " ".join(report.title.split())
    return "\n\n".join(filter(None, [f"{title}:", markdown_table(head, body), notes]))


def with_phases(report: Report) -> str:
    """Formats a throughput report and the time of its decode steps by phase."""
    phases = list(report.rows[0]["phases_ms"])
    columns = [column for column in report.columns if column.key in ("kv_layout", "kind", "batch_size")]
    columns += [Column(phase, phase, 3) for phase in phases]
    rows = [{**row, **row["phases_ms"]} for row in report.rows]
    split = msgspec.structs.replace(report, title="ms of a step by phase", columns=columns, rows=rows, notes=[])
    return f"{markdown(report)}\n\n{markdown(split)}"


def its_table(outcome: CommandResult) -> str:
    """Returns the table that a llama.cpp tool printed, which is Markdown."""
    lines = [line for line in outcome.output.splitlines() if line.startswith("|")]
    if not lines:
        raise ValueError("there is no table in its output")
    return "\n".join(lines)


def about_machine(page: Page) -> None:
    """Adds the first section, with a note if there is no GPU."""
    page.add("## Machine and build")
    machines: list[Machine] = []

    def show(outcome: CommandResult) -> str:
        machine = msgspec.json.decode(outcome.output.strip().splitlines()[-1], type=Machine)
        machines.append(machine)
        return markdown_table(
            ["", ""], [[name, format_value(value)] for name, value in msgspec.to_builtins(machine).items()]
        )

    page.run("Machine and build", [PYTHON, "-c", PRINT_MACHINE], 60, show)
    if machines and not machines[0].devices:
        page.add("**No GPU was there, or none that this build can use: all figures are the CPU's.**")


def format_value(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) or "none"
    return f"{value:,}" if isinstance(value, int) else str(value)


def made_model(page: Page, shape: str, folder: Path) -> Path | None:
    """Writes a random-weight file of this shape. Returns None if that failed."""
    page.add(f"## A model of the shape {shape}")
    model = folder / f"synthetic-{shape}-Q4_0.gguf"
    command = [PYTHON, "scripts/synthetic_model.py", model, "--shape", shape, "--type", "Q4_0"]
    vocab_source = models_folder() / DEFAULT.file_name
    command += ["--vocab-from", vocab_source.absolute() if vocab_source.is_file() else "bytes"]
    return model if page.run(f"Writing {shape}", command, 180, lambda done: as_code(done.output.strip())) else None


def gpu_tests(page: Page, sizes: Sizes) -> None:
    """Runs the tests that compute on the device with tiny models."""
    command = [PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += [f"tests/integration/{name}.py" for name in sizes.tests]
    page.add("## Tests")
    page.run("Tests", command, 120, lambda done: as_code("\n".join(done.output.strip().splitlines()[-OUTPUT_LINES:])))


def main() -> None:
    """Writes the report. The exit code is 0 even if parts failed; the report names them."""
    args = _arguments()
    page = Page(args.output, args.minutes * 60)
    page.add(f"# GPU report\n\nWritten by scripts/gpu_report.py, {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime())}.")
    sizes = SMALL if args.small else Sizes()
    try:
        about_machine(page)
        for named in args.model or ["1B"]:
            with tempfile.TemporaryDirectory(prefix="gpu-report-") as name:
                folder = Path(name)
                model = made_model(page, named, folder) if named in SHAPES else Path(named).absolute()
                if model:
                    Measurement(page, sizes, model, args.gpu_layers, args.peers, folder).all()
        gpu_tests(page, sizes)
    except KeyboardInterrupt:
        page.add_failure("interrupted here")
        sys.exit(130)
    parts = "1 part" if page.failed == 1 else f"{page.failed} parts"
    page.add(f"---\n\n{parts} failed; {page.seconds_elapsed():.0f} s in all.")
    print(f"{args.output}: {parts} failed, {page.seconds_elapsed():.0f} s", file=sys.stderr)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "-m", "--model", action="append", metavar=f"FILE|{'|'.join(SHAPES)}", help="may be given several times (1B)"
    )
    parser.add_argument("-ngl", "--gpu-layers", type=int, default=99)
    parser.add_argument("--peers", type=lambda path: Path(path).absolute(), help="folder with llama.cpp's programs")
    parser.add_argument("-o", "--output", type=Path, default=Path("gpu-report.md"))
    parser.add_argument("--minutes", type=float, default=8, help="for the whole report (8)")
    parser.add_argument("--small", action="store_true", help="minimal sizes, to see whether it works")
    args = parser.parse_args()
    if not args.output.absolute().parent.is_dir():
        parser.error(f"-o {args.output}: there is no folder {args.output.absolute().parent}")
    if args.minutes <= 0:
        parser.error(f"--minutes is {args.minutes:g}: must be above 0")
    return args


if __name__ == "__main__":
    main()
