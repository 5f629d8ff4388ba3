"""`cppbatch batch`: its options, the job, and its progress."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections import deque
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cppbatch.cli.engine_options import (
    Command,
    Option,
    deployment_options,
    engine_options,
    profile_and_memory_options,
    with_options,
)
from cppbatch.cli.loading_bar import loading_bar
from cppbatch.cli.option_groups import GroupedCommand
from cppbatch.cli.sampling_options import DEFAULT_MAX_TOKENS, sampling_options
from cppbatch.cli.server_options import chat_template_option
from cppbatch.config import EngineConfig
from cppbatch.engine.params import SamplingParams

if TYPE_CHECKING:
    from cppbatch.cluster.deployment import Deployment
    from cppbatch.jobs.file_job import FileJob
    from cppbatch.server.batches.offline_batch import OfflineJob

_SAMPLE_S = 0.25  # between two updates of the bar
_N_SAMPLES = 20  # for the speed in the bar
_LINE_INTERVAL_S = 60.0

_JOB_OPTIONS: list[Option] = [
    click.argument("input_file", metavar="INPUT", type=click.Path(path_type=Path)),
    click.option(
        "-o", "--output", required=True, metavar="OUT.jsonl", type=click.Path(path_type=Path),
        help="File for the results. OUT.jsonl.job beside it keeps the progress.",
    ),
    click.option(
        "--errors", metavar="FILE", type=click.Path(path_type=Path), default=None,
        help="File for lines that are refused or fail. Without it: OUT.errors.jsonl.",
    ),
    click.option(
        "--column", default=None, help="Column of a CSV or Parquet file with the prompts. Without it: prompt."
    ),
    click.option(
        "--endpoint", type=click.Choice(["completions", "chat", "embeddings"]), default="completions",
        show_default=True,
        help="For lines that are only prompts: complete them, answer them as chat messages, or embed them.",
    ),
    click.option(
        "--system", metavar="TEXT", default=None, help="System message for every prompt, with --endpoint chat."
    ),
    sampling_options,
    click.option(
        "--ordered", is_flag=True, help="Write results in the order of the input, not in the order they finish."
    ),
    click.option(
        "--longest-first", is_flag=True,
        help="Start with long prompts and long outputs, so that the job does not end with them.",
    ),
    click.option("--retry-failed", is_flag=True, help="Run failed lines again."),
    click.option("--overwrite", is_flag=True, help="Start again from the beginning and discard the results so far."),
    chat_template_option,
]  # fmt: skip


def job_options(command: Command) -> Command:
    """Adds the options of a job. The command gets `job`, a `FileJob`, and `overwrite` and `retry_failed`."""

    @wraps(command)
    def with_job(
        *,
        input_file: Path,
        output: Path,
        errors: Path | None,
        params: dict[str, Any],
        is_capped: bool,
        chat_template: str | None,
        **arguments: Any,
    ) -> Any:
        from cppbatch.jobs.file_job import FileJob
        from cppbatch.jobs.input_format import detect_input_format

        SamplingParams(**params)  # raises for wrong values before a model is downloaded
        input_format = detect_input_format(
            input_file,
            column=arguments.pop("column"),
            endpoint=arguments.pop("endpoint"),
            system=arguments.pop("system"),
        )
        job = FileJob(
            input_format=input_format,
            output=output,
            errors=errors or output.with_name(f"{output.stem}.errors{output.suffix or '.jsonl'}"),
            defaults=params,
            plain_max_tokens=DEFAULT_MAX_TOKENS if is_capped and input_format.endpoint == "completions" else None,
            chat_template=chat_template,
            ordered=arguments.pop("ordered"),
            longest_first=arguments.pop("longest_first"),
        )
        return command(job=job, **arguments)

    return with_options(with_job, _JOB_OPTIONS)


@click.command(cls=GroupedCommand)
@job_options  # first, so that their errors come before a model is downloaded
@deployment_options
@partial(engine_options, without=("max_wait_ms",))
@profile_and_memory_options
def batch(config: EngineConfig, deployment: Deployment, job: FileJob, overwrite: bool, retry_failed: bool) -> None:
    """Runs every line of a file. The same command resumes an interrupted job.

    INPUT is in OpenAI's batch format (JSON lines), or contains only prompts: JSON lines like {"prompt": "..."}, .txt
    with one prompt per line, .csv, .parquet. After Ctrl-C, a crash or a power loss, run the same command again: it
    answers every line exactly once. The exit code is 1 if lines failed.
    """
    from cppbatch.jobs.file_job import open_job
    from cppbatch.jobs.input_reader import InputReader
    from cppbatch.server.batches.batch_handler import URLS
    from cppbatch.server.batches.offline_batch import OfflineJob, run_offline

    with InputReader(job.input_format, URLS) as reader:
        reader.check()  # before anything is written
        journal = open_job(job, config.model_path, overwrite=overwrite, retry_failed=retry_failed, say=_say)
        if job.plain_max_tokens:
            _say(f"plain prompts get at most {job.plain_max_tokens} tokens; -n sets another limit, -n -1 none")
        offline = OfflineJob(job, journal, reader)
        progress = BatchProgress(offline)
        try:
            with progress:
                is_done = asyncio.run(
                    run_offline(config, deployment, offline, started=progress.start, show_loading=loading_bar)
                )
        finally:
            journal.close()
            _say(f"{journal.n_completed} done, {journal.n_failed} failed; {progress.speed()}")
            _say(f"results: {job.output}" + (f"; errors: {job.errors}" if journal.n_failed else ""))
    if not is_done:
        _say("stopped before the end; run the same command to resume")
        raise click.Abort
    if journal.n_failed:
        sys.exit(1)


def _say(line: str) -> None:
    click.echo(line, err=True)


class BatchProgress:
    """Shows a job's progress from a thread: a bar on a terminal, else a line per minute. A context manager."""

    def __init__(self, job: OfflineJob) -> None:
        self._job = job
        self._began = 0.0
        self._samples: deque[tuple[float, int]] = deque(maxlen=_N_SAMPLES)  # time, tokens
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cppbatch-progress", daemon=True)

    def __enter__(self) -> BatchProgress:
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def start(self) -> None:
        """Starts the clock; called when the model is loaded."""
        self._began = time.perf_counter()
        self._thread.start()

    def speed(self) -> str:
        """The tokens generated since the start, the time, and tokens per second."""
        seconds = time.perf_counter() - self._began if self._began else 0.0
        rate = f" in {seconds:.0f} s, {self._job.n_tokens / seconds:.0f} tokens/s" if seconds else ""
        return f"{self._job.n_tokens} tokens{rate}"

    def _run(self) -> None:
        if sys.stderr.isatty():
            self._show_bar()
        else:
            while not self._ended.wait(_LINE_INTERVAL_S):
                _say(f"{self._counts()} of {self._job.n_lines}; {self.speed()}")

    def _counts(self) -> str:
        journal = self._job.journal
        return f"{journal.n_completed} done, {journal.n_failed} failed"

    def _show_bar(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        columns = (
            BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn(),
            TextColumn("left:"), TimeRemainingColumn(),
        )  # fmt: skip
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task("")
            while True:
                has_ended = self._ended.wait(_SAMPLE_S)
                job = self._job
                description = (
                    f"done, {job.journal.n_failed} failed, {self._recent_speed():.0f} tokens/s, batch {job.n_running}"
                )
                n_ended = job.journal.n_completed + job.journal.n_failed
                bar.update(task, completed=n_ended, total=job.n_lines, description=description)
                if has_ended:
                    return

    def _recent_speed(self) -> float:
        """Tokens per second over the last 5 seconds."""
        self._samples.append((time.perf_counter(), self._job.n_tokens))
        (then, before), (now, tokens) = self._samples[0], self._samples[-1]
        return (tokens - before) / (now - then) if now > then else 0.0
