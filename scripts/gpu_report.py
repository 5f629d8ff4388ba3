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
        self.path, self.failed = path, 0
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
        self.add("\n\n".join([f"**Failed**: {why}.", *([last_lines(output)] if output.strip() else [])]))

    def seconds_left(self) -> float:
        return self._end - time.monotonic()

    def seconds_elapsed(self) -> float:
        return time.monotonic() - self._began

    def run(
        self, title: str, command: Command, seconds: float, show: Callable[[CommandResult], str], heading: str = "###"
    ) -> bool:
        """Adds a section with a command and its result, formatted by `show`. Returns whether it succeeded. `heading`:
        its marks; empty: the section has begun."""
        if heading:
            self.add(f"{heading} {title}")
        if self.seconds_left() < MIN_SECONDS:
            self.add_failure("not begun, because the time for the whole report (--minutes) is over")
            return False
        print(f"{self.seconds_elapsed():4.0f} s  {title}", file=sys.stderr, flush=True)
        self.add(shell_line(command))
        outcome = run_with_timeout(list(map(str, command)), min(seconds, self.seconds_left()))
        if outcome.failure:
            self.add_failure(outcome.failure, outcome.output)
            return False
        try:
            self.add(f"{show(outcome)}\n\nTook {outcome.seconds:.1f} s.")
        except (OSError, ValueError, LookupError) as error:  # the command succeeded, but its result is unreadable
            self.add_failure(f"its result cannot be read: {error}", outcome.output)
            return False
        return True


def as_code(text: str) -> str:
    return f"```text\n{text.replace('```', chr(39) * 3)}\n```"


def last_lines(output: str) -> str:
    return as_code("\n".join(output.strip().splitlines()[-OUTPUT_LINES:]))


def shell_line(command: Command) -> str:
    """Formats a command as in a shell."""
    return as_code(shlex.join("python" if word == PYTHON else str(word) for word in command))


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
        for layout in ("unified", "per-sequence"):
            self.batched_bench(layout)
        title = "The engine, and where the time of a step goes"
        self.engine(title, self.sizes.batch_sizes, "unified,per-sequence", "greedy", "backend", seconds=150)
        for where in ("host", "backend"):
            self.engine(f"Sampling: {where}", self.sizes.sampled, "unified", "defaults", where, seconds=75)
        self.servers()

    def batched_bench(self, layout: str) -> None:
        sizes, title = self.sizes, f"llama-batched-bench, {layout}"
        self.page.add(f"### {title}")
        if not (binary := self._peer("llama-batched-bench")):
            return
        cells = max(sizes.batch_sizes) * (sizes.prompt + sizes.new)
        command = [
            binary, "-m", self.model, "-ngl", self.gpu_layers, "-c", cells, "-b", 2048, "-ub", 512, "-fa", "on",
            "-npp", sizes.prompt, "-ntg", sizes.new, "-npl", numbers(sizes.batch_sizes),
            *(["-kvu"] if layout == "unified" else []),
        ]  # fmt: skip
        self.page.run(title, command, 60, its_table, "")

    def engine(
        self, title: str, batch_sizes: tuple[int, ...], layouts: str, kinds: str, sampling: str, *, seconds: float
    ) -> None:
        sizes, file = self.sizes, self.folder / f"{kinds}-{sampling}.json"
        command = [
            *CPPBATCH, "bench", "throughput", "-m", self.model, "-ngl", self.gpu_layers, "-B", numbers(batch_sizes),
            "--layouts", layouts, "--flash-attns", "on", "--sampling", sampling, "--kinds", kinds,
            "--prompt-tokens", sizes.prompt, "--new-tokens", sizes.new, "--repeats", sizes.repeats, "--json", file,
        ]  # fmt: skip
        self.page.run(title, command, seconds, lambda _: with_phases(read_report(file)))

    def servers(self) -> None:
        sizes, file, title = self.sizes, self.folder / "serve.json", "Servers under load"
        common = ["-m", self.model, "-ngl", self.gpu_layers, "-c", sizes.cells, "-np", sizes.concurrency, "-fa", "on"]
        commands: dict[str, Command] = {"ours": [*CPPBATCH, "serve", *common]}
        self.page.add(f"### {title}")
        if binary := self._peer("llama-server"):
            commands["llama-server"] = [binary, *common, "--cache-ram", 0, "--no-ui"]
            commands["llama-server-bs"] = [*commands["llama-server"], "--backend-sampling"]
        with ExitStack() as stack:
            urls = [url for name, command in commands.items() for url in self._start(stack, name, command)]
            command = [
                *CPPBATCH, "bench", "serve", *urls, "--workload", "mixed", "--requests", sizes.requests,
                "--concurrency", sizes.concurrency, "--repeats", sizes.repeats, "--json", file,
            ]  # fmt: skip
            if urls:
                self.page.run(title, command, 120, lambda _: markdown(read_report(file)), "")

    def _start(self, stack: ExitStack, name: str, command: Command) -> list[str]:
        """Starts a server. Returns `--url` and its address; if it does not get ready, the report gives the reason."""
        port = free_port()
        command = [*command, "--port", port]
        self.page.add(shell_line(command))
        try:
            server = stack.enter_context(ChildProcess(list(map(str, command))))
        except OSError as error:
            self.page.add_failure(f"{name} could not be started: {error}")
            return []
        if problem := server.wait_for(f"http://127.0.0.1:{port}/health", min(60, self.page.seconds_left())):
            self.page.add_failure(f"{name} {problem}", server.output())
            return []
        return ["--url", f"{name}=http://127.0.0.1:{port}"]

    def _peer(self, name: str) -> Path | None:
        """Returns a program of the peers; if there is none, the report says so."""
        folders = [self.peers / "bin", self.peers] if self.peers else []
        if found := shutil.which(name, path=os.pathsep.join(map(str, folders))) if folders else None:
            return Path(found).resolve()
        where = f"there is no {name} in {self.peers} or its bin folder" if self.peers else "--peers was not given"
        self.page.add(f"{name} was not measured: {where}.")
        return None


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
    devices: list[Any] = []

    def show(outcome: CommandResult) -> str:
        fields = msgspec.json.decode(outcome.output.strip().splitlines()[-1])
        devices.append(fields["devices"])
        return markdown_table(["", ""], [[name, format_value(value)] for name, value in fields.items()])

    page.run("Machine and build", [PYTHON, "-c", PRINT_MACHINE], 60, show, "##")
    if devices == [[]]:
        page.add("**No GPU was there, or none that this build can use: all figures are the CPU's.**")


def format_value(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) or "none"
    return f"{value:,}" if isinstance(value, int) else str(value)


def made_model(page: Page, shape: str, folder: Path) -> Path | None:
    """Writes a random-weight file of this shape. Returns None if that failed."""
    model, vocab_source = folder / f"synthetic-{shape}-Q4_0.gguf", models_folder() / DEFAULT.file_name
    command = [PYTHON, "scripts/synthetic_model.py", model, "--shape", shape, "--type", "Q4_0"]
    command += ["--vocab-from", vocab_source.absolute() if vocab_source.is_file() else "bytes"]
    is_written = page.run(f"A model of the shape {shape}", command, 180, lambda done: last_lines(done.output), "##")
    return model if is_written else None


def main() -> None:
    """Writes the report. The exit code is 0 even if parts failed; the report names them."""
    args = _arguments()
    os.chdir(ROOT)  # where child processes import this checkout's package and find its files
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    page, sizes = Page(args.output, args.minutes * 60), SMALL if args.small else Sizes()
    page.add(f"# GPU report\n\nWritten by scripts/gpu_report.py, {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime())}.")
    tests = [PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    tests += [f"tests/integration/{name}.py" for name in sizes.tests]  # compute on the device with tiny models
    try:
        about_machine(page)
        for named in args.model or ["1B"]:
            with tempfile.TemporaryDirectory(prefix="gpu-report-") as name:
                folder = Path(name)
                if model := made_model(page, named, folder) if named in SHAPES else named:
                    Measurement(page, sizes, model, args.gpu_layers, args.peers, folder).all()
        page.run("Tests", tests, 120, lambda done: last_lines(done.output), "##")
    except KeyboardInterrupt:
        page.add_failure("interrupted here")
        sys.exit(130)
    parts = "1 part" if page.failed == 1 else f"{page.failed} parts"
    page.add(f"---\n\n{parts} failed; {page.seconds_elapsed():.0f} s in all.")
    print(f"{args.output}: {parts} failed, {page.seconds_elapsed():.0f} s", file=sys.stderr)


def absolute(path: str) -> Path:
    return Path(path).absolute()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "-m",
        "--model",
        action="append",
        type=lambda name: name if name in SHAPES else absolute(name),
        metavar=f"FILE|{'|'.join(SHAPES)}",
        help="may be given several times (1B)",
    )
    parser.add_argument("-ngl", "--gpu-layers", type=int, default=99)
    parser.add_argument("--peers", type=absolute, help="folder with llama.cpp's programs")
    parser.add_argument("-o", "--output", type=absolute, default=Path("gpu-report.md").absolute())
    parser.add_argument("--minutes", type=float, default=8, help="for the whole report (8)")
    parser.add_argument("--small", action="store_true", help="minimal sizes, to see whether it works")
    args = parser.parse_args()
    if not args.output.parent.is_dir():
        parser.error(f"-o {args.output}: there is no folder {args.output.parent}")
    if args.minutes <= 0:
        parser.error(f"--minutes is {args.minutes:g}: must be above 0")
    return args


if __name__ == "__main__":
    main()
