"""`cppbatch batch`: its options, the job, and its progress."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from datetime import timedelta
from functools import partial, wraps
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from cppbatch.cli.deployment_options import deployment_options
from cppbatch.cli.engine_options import Command, Option, engine_options, profile_and_memory_options, with_options
from cppbatch.cli.option_groups import GroupedCommand
from cppbatch.cli.output import loading_bar
from cppbatch.cli.sampling_options import sampling_options
from cppbatch.cli.server_options import MEDIA_OPTIONS, are_chats, chat_template_option, take_video_settings
from cppbatch.config import SCALED_FILES, EngineConfig
from cppbatch.engine.params import DEFAULT_MAX_TOKENS, SamplingParams
from cppbatch.regular_files import open_regular

if TYPE_CHECKING:
    from cppbatch.cluster.deployment import Deployment
    from cppbatch.jobs.file_job import FileJob
    from cppbatch.jobs.input.format import Endpoint
    from cppbatch.jobs.journal import Journal
    from cppbatch.models.attention_times import RequestSizes
    from cppbatch.server.api.batches.offline import OfflineJob
    from cppbatch.server.video import VideoSettings

_SIZED_FILES = 16  # read to estimate the sizes of a job: reading a PDF takes a second

_JOB_OPTIONS: list[Option] = [
    click.argument("inputs", metavar="INPUT...", nargs=-1, required=True, type=click.Path(path_type=Path)),
    click.option(
        "-o", "--output", required=True, metavar="OUT", type=click.Path(path_type=Path),
        help="File for the results: JSON Lines, or a .csv, .tsv or .parquet file with the input columns plus the "
        "answers. If each file is a prompt, a name without extension is a folder for the answers. Progress is stored "
        "next to it: for out.jsonl, in out.jsonl.job. - writes to standard output.",
    ),
    click.option(
        "--errors", metavar="FILE", type=click.Path(path_type=Path), default=None,
        help="File for lines that are rejected or fail. Default: next to the output; for out.jsonl, out.errors.jsonl.",
    ),
    click.option(
        "--column", default=None, help="Column of a CSV or Parquet file that contains the prompts. Default: prompt."
    ),
    click.option(
        "--template", metavar="TEXT", default=None,
        help='Template that builds a prompt from the columns of each row, such as "Classify: {text}". In text files, '
        '{prompt} is the line; for prompts that are files, {text} is the text and {file} the name.',
    ),
    click.option(
        "--id-column", metavar="NAME", default=None,
        help="Column that identifies the results (custom_id). Default: custom_id, or id if its values are unique texts "
        "or integers.",
    ),
    click.option(
        "--endpoint", type=click.Choice(["completions", "chat", "embeddings"]), default=None,
        help="What to do with lines that are plain prompts: continue them, answer them as chat messages, or embed "
        "them.  [default: chat, if the model has a chat template]",
    ),
    click.option("--raw", is_flag=True, help="Continue plain prompts as they are; same as --endpoint completions."),
    click.option("--system", metavar="TEXT", default=None, help="System message for every plain prompt."),
    sampling_options,
    click.option(
        "--ordered", is_flag=True, help="Write results in input order instead of completion order."
    ),
    click.option(
        "--longest-first", is_flag=True,
        help="Start with the longest prompts and outputs, so that the job does not end with a few slow ones.",
    ),
    click.option("--retry-failed", is_flag=True, help="Run failed lines again."),
    click.option("--overwrite", is_flag=True, help="Discard the results so far and start over."),
    chat_template_option,
    *MEDIA_OPTIONS,
]  # fmt: skip


def job_options(command: Command) -> Command:
    """Adds the options of a job. The command gets `job`, a `FileJob`, whether its endpoint was given, and `overwrite`
    and `retry_failed`."""

    @wraps(command)
    def with_job(
        *,
        inputs: tuple[Path, ...],
        output: Path,
        errors: Path | None,
        params: dict[str, Any],
        is_capped: bool,
        chat_template: str | None,
        **arguments: Any,
    ) -> Any:
        from cppbatch.jobs.file_job import FileJob, is_table, named
        from cppbatch.jobs.input.files import are_prompts, find_inputs
        from cppbatch.jobs.input.format import detect_input_format
        from cppbatch.regular_files import is_stream

        if not output.name:
            raise click.BadParameter(f"'{output}' is a folder; give the name of a file", param_hint="-o")
        endpoint: Endpoint | None = arguments.pop("endpoint")
        system, raw = arguments.pop("system"), arguments.pop("raw")
        if raw and endpoint not in (None, "completions"):
            raise click.UsageError(
                f"--raw means --endpoint completions and conflicts with --endpoint {endpoint}: give only one of them"
            )
        endpoint = "completions" if raw else "chat" if system is not None and endpoint is None else endpoint
        assumed = {"max_tokens"} if is_capped else set()
        if "compact_json" not in params:
            params, assumed = {"compact_json": True} | params, assumed | {"compact_json"}
        SamplingParams(**params)  # raises for wrong values before a model is downloaded
        source, files = find_inputs(inputs, _say) if are_prompts(inputs) else (inputs[0], None)
        input_format = detect_input_format(
            source,
            column=arguments.pop("column"),
            endpoint=endpoint or "completions",
            system=system,
            template=arguments.pop("template"),
            id_column=arguments.pop("id_column"),
            only_prompts=is_table(output),
            files=files,
            whole_folder=len(inputs) == 1 and inputs[0].is_dir(),
        )
        has_suffix = output.suffix and not (is_table(output) or output.is_dir())
        stem, suffix = (output.stem, output.suffix) if has_suffix else (output.name, ".jsonl")
        beside_output = output if is_stream(output) else output.with_name(f"{stem}.errors{suffix}")
        job = FileJob(
            input_format=input_format,
            output=output,
            errors=errors or beside_output,
            defaults=params,
            plain_max_tokens=DEFAULT_MAX_TOKENS if is_capped and endpoint != "embeddings" else None,
            chat_template=chat_template,
            ordered=arguments.pop("ordered"),
            longest_first=arguments.pop("longest_first"),
            assumed=frozenset(assumed),
        )
        job = named(job, overwrite=arguments["overwrite"], say=_say)
        return command(job=job, is_endpoint_given=endpoint is not None, **arguments)

    return with_options(with_job, _JOB_OPTIONS)


def _job_sizes(arguments: Mapping[str, Any], config: EngineConfig) -> RequestSizes | None:
    from cppbatch.jobs.input.reader import InputReader
    from cppbatch.jobs.request_order import estimate_sizes
    from cppbatch.server.api.batches.handler import URLS

    if config.mmproj:
        return None  # the tokens of images and audio do not follow from their bytes
    job: FileJob = arguments["job"]
    with InputReader(job.input_format, URLS) as reader:
        if not (files := job.input_format.files):
            return estimate_sizes(reader, job.defaults)
        sizes = estimate_sizes(islice(reader, _SIZED_FILES), job.defaults)
    return sizes and type(sizes)(*(each * max(1, len(files) / _SIZED_FILES) for each in sizes))


def unless_finished(command: Command) -> Command:
    """For a job that has a result for each line, only says so, before anything is planned or loaded.

    The command gets a `job` with its endpoint and with the settings of its results so far, and `has_prompts`: whether
    its first line is a plain prompt.
    """

    @wraps(command)
    def with_unfinished(
        *,
        config: EngineConfig,
        job: FileJob,
        is_endpoint_given: bool,
        overwrite: bool,
        retry_failed: bool,
        **arguments: Any,
    ) -> Any:
        from cppbatch.jobs.file_job import as_begun, begun_with
        from cppbatch.jobs.input.reader import InputReader
        from cppbatch.jobs.job_request import JobRequest
        from cppbatch.server.api.batches.handler import URLS

        video = take_video_settings(arguments)
        job = msgspec.structs.replace(job, model_changes=_changes(config, video))
        with InputReader(job.input_format, URLS) as reader:
            first = reader.first()  # before anything is written
        has_prompts = isinstance(first, JobRequest) and first.is_plain
        begun, lines = {} if overwrite else begun_with(job), []
        if not is_endpoint_given:
            if endpoint := begun.get("endpoint"):  # even if the model has since been removed
                lines.append(f"the job was started with --endpoint {endpoint} and continues with it")
            is_chat = not endpoint and are_chats(config, job.chat_template, None, says=has_prompts)
            form = msgspec.structs.replace(
                job.input_format, endpoint=endpoint or ("chat" if is_chat else "completions")
            )
            job = msgspec.structs.replace(job, input_format=form)
        job = job if overwrite else as_begun(job, say=lines.append)
        if begun and _is_finished(job, config.model_path, retry_failed=retry_failed):
            return None
        for line in lines:
            _say(line)
        return command(
            config=config,
            job=job,
            has_prompts=has_prompts,
            video=video,
            overwrite=overwrite,
            retry_failed=retry_failed,
            **arguments,
        )

    return with_unfinished


def _is_finished(job: FileJob, model: str, *, retry_failed: bool) -> bool:
    """Whether each line has a result already. Then says so, and writes the table again."""
    from cppbatch.jobs.file_job import open_job
    from cppbatch.jobs.input.reader import InputReader
    from cppbatch.jobs.request_order import chunks
    from cppbatch.jobs.result_table import input_stamp
    from cppbatch.server.api.batches.handler import URLS

    stamp = input_stamp(job.input_format)
    with InputReader(job.input_format, URLS) as reader:
        journal = open_job(job, model, say=lambda _line: None)
        try:
            is_open = (retry_failed and journal.n_failed) or any(journal.register(chunk) for chunk in chunks(reader))
        finally:
            journal.close()
    if is_open:
        return False
    _write_output(job, stamp)
    n_lines, noun = journal.n_completed + journal.n_failed, "file" if job.input_format.files else "line"
    failed = f", of which {journal.n_failed} failed (--retry-failed runs them again)" if journal.n_failed else ""
    _say(f"finished already: {n_lines} {noun}{'s' * (n_lines != 1)}{failed}")
    _say_results(job, journal, is_done=True)
    return True


def _write_output(job: FileJob, stamp: tuple[int, int, int] | None) -> None:
    """Writes the table or the folder of a job whose lines all have results."""
    from cppbatch.jobs.result_table import write_answers, write_table

    if job.is_folder:
        write_answers(job.input_format, job.results, job.errors, job.output)
    elif job.is_written_at_end:
        schema = job.defaults.get("json_schema")
        decoded = msgspec.json.decode(schema) if isinstance(schema, str) else schema
        write_table(job.input_format, job.results, job.errors, job.output, stamp, schema=decoded)


def _say_results(job: FileJob, journal: Journal, *, is_done: bool) -> None:
    """Where the results are. Ends the process with code 1 if lines of a finished job have failed."""
    if journal.n_failed and job.errors != job.output and (reason := first_failure(job.errors)):
        _say(f"first failure: {reason}")
    if is_done and not journal.n_completed + journal.n_failed:
        _say(f"{job.input_format.path} contains no lines to answer")
    if not job.is_stream:
        results = job.output if is_done else job.results
        _say(f"results: {results}" + (f"; errors: {job.errors}" if journal.n_failed else ""))
    if is_done and journal.n_failed:
        sys.exit(1)


_COMMON = (
    "endpoint output column template system ordered retry_failed overwrite model hf_repo mmproj lora chat_template "
    "n_parallel n_ctx n_threads n_gpu_layers workers devices n_predict temperature json_schema seed verbose"
)
"""The options that --help shows; --help-all shows all."""


@click.command(cls=GroupedCommand, common=_COMMON)
@job_options  # first, so that their errors come before a model is downloaded
@deployment_options
@partial(engine_options, without=("max_wait_ms",))
@unless_finished
@partial(profile_and_memory_options, sizes_of=_job_sizes)
def batch(
    *,
    config: EngineConfig,
    deployment: Deployment,
    job: FileJob,
    has_prompts: bool,
    overwrite: bool,
    retry_failed: bool,
    allowed_media_domains: tuple[str, ...],
    media_path: Path | None,
    video: VideoSettings,
) -> None:
    """Run every line of a file. The same command resumes an interrupted job.

    INPUT is in OpenAI's batch format (JSON Lines), or contains plain prompts: JSON Lines such as {"prompt": "..."},
    .txt with one prompt per line, .csv, .parquet. Of a folder, a zip file or several files, each file is one prompt, as
    is a PDF. After Ctrl-C, a crash or a power loss, run the same command again: every line is answered exactly once.
    The exit code is 1 if any lines failed.
    """
    from cppbatch.jobs.file_job import open_job
    from cppbatch.jobs.input.reader import InputReader
    from cppbatch.jobs.result_table import input_stamp
    from cppbatch.server.api.batches.handler import URLS
    from cppbatch.server.api.batches.offline import OfflineJob, run_offline
    from cppbatch.server.settings import ServerSettings

    stamp = input_stamp(job.input_format)
    settings = ServerSettings(
        chat_template=job.chat_template,
        allowed_media_domains=allowed_media_domains,
        media_path=media_path,
        video=video,
    )
    with InputReader(job.input_format, URLS) as reader:
        journal = open_job(job, config.model_path, overwrite=overwrite, retry_failed=retry_failed, say=_say)
        if job.plain_max_tokens and has_prompts:
            _say(
                f"plain prompts get at most {job.plain_max_tokens} tokens; change the limit with -n N, or "
                "remove it with -n -1"
            )
        offline = OfflineJob(job, journal, reader)
        progress, is_done = BatchProgress(offline), False
        try:
            with progress:
                is_done = asyncio.run(
                    run_offline(config, deployment, offline, settings, started=progress.start, show_loading=loading_bar)
                )
        finally:
            journal.close()
            if is_done:
                _write_output(job, stamp)
            _say(f"{journal.n_completed} done, {journal.n_failed} failed; {progress.speed()}")
            _say_results(job, journal, is_done=is_done)
    if not is_done:
        _say("stopped before the end" + ("" if job.is_stream else "; run the same command to resume"))
        raise click.Abort


def first_failure(errors: Path) -> str:
    """The message of the first failed line, among the earliest failures; "" without failures or if they are gone."""
    try:
        with open_regular(errors) as file:
            # failures are recorded in the order in which they occur: the first line is usually among the first 1000
            result = min(map(msgspec.json.decode, islice(file, 1000)), key=lambda each: each["line"])
        error = result["error"] or result["response"]["body"]["error"]
        return f"line {result['line']}: {error['message']}"
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _say(line: str) -> None:
    click.echo(line, err=True)


def _changes(config: EngineConfig, video: VideoSettings) -> dict[str, Any]:
    """The given settings that change what answers say, as a ledger has them."""
    scaled = {name: [(Path(path).name, scale) for path, scale in getattr(config, name)] for name in SCALED_FILES}
    given = {**config.model_changes, **{name: files for name, files in scaled.items() if files}}
    if video[:2] != type(video)()[:2]:
        given |= {"video_fps": video.fps, "video_timestamp_interval": video.timestamp_interval}
    changes: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(given))
    return changes


class BatchProgress:
    """A context manager that shows a job's progress from a thread: a bar on a terminal, otherwise a line per minute."""

    def __init__(self, job: OfflineJob) -> None:
        self._job = job
        self._began = 0.0
        self._n_before = 0  # lines finished when the clock started
        self._samples: deque[tuple[float, int]] = deque(maxlen=20)  # time, tokens: for the speed in the bar
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
        self._n_before = self._n_ended
        self._thread.start()

    def speed(self) -> str:
        """The tokens generated since the start, the time, and tokens per second."""
        seconds = time.perf_counter() - self._began if self._began else 0.0
        rate = f" in {seconds:.0f} s, {self._job.n_tokens / seconds:.3g} tokens/s" if seconds else ""
        return f"{self._job.n_tokens} tokens{rate}"

    def _run(self) -> None:
        if sys.stderr.isatty() and not (self._job.job.is_stream and sys.stdout.isatty()):  # results would garble it
            self._show_bar()
        else:
            while not self._ended.wait(60.0):
                _say(f"{self._counts()}; {self.speed()}{self._time_left()}")

    @property
    def _n_ended(self) -> int:
        return self._job.journal.n_completed + self._job.journal.n_failed

    def _counts(self) -> str:
        journal, total = self._job.journal, self._job.n_lines
        of = "" if total is None else f" of {total}"
        return f"{journal.n_completed} done, {journal.n_failed} failed{of}"

    def _time_left(self) -> str:
        """The remaining time at the speed so far; empty if unknown."""
        n, seconds = self._n_ended - self._n_before, time.perf_counter() - self._began
        if not n or self._job.n_lines is None:
            return ""
        return f", {timedelta(seconds=round((self._job.n_lines - self._n_ended) * seconds / n))} left"

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
            BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TextColumn("elapsed:"),
            TimeElapsedColumn(), TextColumn("left:"), TimeRemainingColumn(),
        )  # fmt: skip
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task("", total=None)
            while True:
                has_ended = self._ended.wait(0.25)
                job = self._job
                description = (
                    f"done, {job.journal.n_failed} failed, {self._recent_speed():.3g} tokens/s, batch {job.n_running}"
                )
                bar.update(task, completed=self._n_ended, total=job.n_lines, description=description)
                if has_ended:
                    return

    def _recent_speed(self) -> float:
        """Tokens per second over the last 5 seconds."""
        self._samples.append((time.perf_counter(), self._job.n_tokens))
        (then, before), (now, tokens) = self._samples[0], self._samples[-1]
        return (tokens - before) / (now - then) if now > then else 0.0
