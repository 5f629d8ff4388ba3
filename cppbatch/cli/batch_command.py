"""`cppbatch batch`."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

import click

from cppbatch.cli.deployment_options import deployment_options
from cppbatch.cli.engine_options import engine_options
from cppbatch.cli.fitting import fitted
from cppbatch.cli.job_options import job_options
from cppbatch.config import EngineConfig

if TYPE_CHECKING:
    from cppbatch.cluster.deployment import Deployment
    from cppbatch.jobs.file_job import FileJob


@click.command()
@job_options  # these first, so that they complain before a model is fetched
@deployment_options
@engine_options
@fitted
def batch(config: EngineConfig, deployment: Deployment, job: FileJob, overwrite: bool, retry_failed: bool) -> None:
    """Answers every line of a file, and goes on where it was when it is run again.

    INPUT is in OpenAI's batch format (JSON lines), or has mere prompts: JSON lines like {"prompt": "..."}, .txt with
    one a line, .csv, .parquet. After Ctrl-C, a crash or a power loss the same command goes on: no line is answered
    twice, and none is lost. The exit code is 1 when lines have failed.
    """
    from cppbatch.cli.batch_progress import BatchProgress
    from cppbatch.jobs.file_job import open_job
    from cppbatch.jobs.input_reader import InputReader
    from cppbatch.server.batches.offline import OfflineJob, run_offline
    from cppbatch.server.batches.work import URLS

    with InputReader(job.input_format, URLS) as reader:
        journal = open_job(job, config.model_path, overwrite=overwrite, retry_failed=retry_failed, say=_say)
        offline = OfflineJob(job, journal, reader)
        progress = BatchProgress(offline)
        try:
            with progress:
                is_done = asyncio.run(run_offline(config, deployment, offline, started=progress.start))
        finally:
            journal.close()
            _say(f"{journal.n_completed} done, {journal.n_failed} failed; {progress.speed()}")
            _say(f"results: {job.output}" + (f"; errors: {job.errors}" if journal.n_failed else ""))
    if not is_done:
        _say("stopped before the end; the same command goes on")
        raise click.Abort
    if journal.n_failed:
        sys.exit(1)


def _say(line: str) -> None:
    click.echo(line, err=True)
