"""A job of one input file and one output file, with its ledger beside that."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import msgspec

from cppbatch.errors import ConfigError, InUse, StorageError
from cppbatch.jobs.durable_files import storage_error
from cppbatch.jobs.input_format import InputFormat
from cppbatch.jobs.job_request import Json
from cppbatch.jobs.journal import Journal
from cppbatch.jobs.ledger import Ledger
from cppbatch.jobs.line_reader import unreadable_file

_SETTINGS = "settings"


class FileJob(msgspec.Struct, frozen=True, kw_only=True):
    """From which file to which. Raises `ConfigError` when two of them are the same."""

    form: InputFormat
    output: Path
    errors: Path
    """For lines that were refused or failed; made when there is a first one."""
    defaults: Json = {}
    """Fields of items that do not give them."""
    chat_template: str | None = None
    """The template itself; None: the model's own."""
    ordered: bool = False
    """Results in the order of the input's lines, not as they come."""
    longest_first: bool = False
    """Begin with long prompts and long answers."""

    def __post_init__(self) -> None:
        names = {"the input": self.form.path, "-o": self.output, "--errors": self.errors, "the ledger": self.ledger}
        for (one, path), (other, its) in combinations(names.items(), 2):
            if path.resolve() == its.resolve():
                raise ConfigError(f"{one} and {other} are the same file, {path}")

    @property
    def ledger(self) -> Path:
        """What has become of each line."""
        return self.output.with_name(self.output.name + ".job")

    def settings(self, model: str) -> Json:
        """What results depend on beside the input: those in one file are all made with the same ones."""
        form = {name: getattr(self.form, name) for name in ("endpoint", "column", "system")}
        ours = {"chat template": self.chat_template, "ordered": self.ordered, "errors": self.errors_beside_output}
        return {"model": Path(model).name, **form, **ours, **self.defaults}

    @property
    def errors_beside_output(self) -> str:
        """A name that stays the same when the folder with both is moved."""
        folder, errors = self.output.resolve().parent, self.errors.resolve()
        return str(errors.relative_to(folder) if errors.is_relative_to(folder) else errors)


def open_job(
    job: FileJob, model: str, *, overwrite: bool = False, retry_failed: bool = False, say: Callable[[str], None]
) -> Journal:
    """Begins a job with this model, or goes on with it where it was. `say` gets what the person should know.

    `overwrite`: begins anew, whatever there is. `retry_failed`: lines that failed are answered again. Raises
    `ConfigError` for files of something else, `StorageError` for a ledger that is in use, broken or on a full disk.
    """
    if overwrite:
        _check_input(job)
        _remove(job, job.output, job.errors)
    elif job.ledger.exists() and not job.output.exists():
        say(f"{job.output} is gone, so the job begins anew")
        _remove(job, *_its_errors(job))
    if not job.ledger.exists():
        _refuse_others(job)
    ledger = Ledger(job.ledger)
    try:
        _check_settings(job, model, ledger)
        if ledger.n_done or ledger.n_failed:
            say(f"going on: {ledger.n_done} lines are done, {ledger.n_failed} have failed")
        if retry_failed and ledger.n_failed:
            say("those that have failed are tried again")
            ledger.reopen_failed()
        return Journal(ledger, job.output, job.errors, ordered=job.ordered)
    except BaseException:
        ledger.close()
        raise


def _its_errors(job: FileJob) -> list[Path]:
    """The file for errors, if it is the one that the job had so far and not somebody else's."""
    ledger = Ledger(job.ledger)
    try:
        begun_with = ledger.note(_SETTINGS) or {}
    finally:
        ledger.close()
    return [job.errors] if begun_with.get("errors") == job.errors_beside_output else []


def _check_input(job: FileJob) -> None:
    """Nothing is lost for the sake of an input that is not there."""
    try:
        job.form.path.open("rb").close()
    except (OSError, ValueError) as error:  # ValueError: a path that cannot be one
        raise unreadable_file(job.form.path, error) from None


def _remove(job: FileJob, *files: Path) -> None:
    """First takes the ledger, so that nothing is pulled from under another process."""
    try:
        if job.ledger.exists():
            Ledger(job.ledger).close()
    except InUse:
        raise
    except StorageError:  # broken: a good reason to begin anew
        pass
    for path in (job.ledger, *files):
        for each in (path, *(path.with_name(path.name + ending) for ending in ("-wal", "-shm"))):
            try:
                each.unlink(missing_ok=True)
            except OSError as error:
                raise storage_error(each, error) from error


def _refuse_others(job: FileJob) -> None:
    for path in (job.output, job.errors):
        if path.exists() and (not path.is_file() or path.stat().st_size):
            raise ConfigError(
                f"{path} is there already, and not of a job that can go on ({job.ledger.name} is missing): "
                "give another -o, or --overwrite"
            )


def _check_settings(job: FileJob, model: str, ledger: Ledger) -> None:
    begun_with, now = ledger.note(_SETTINGS), job.settings(model)
    if begun_with is None:
        ledger.set_note(_SETTINGS, now)
        return
    for name in {**begun_with, **now}:
        if begun_with.get(name) != now.get(name):
            raise ConfigError(
                f"{job.output} was begun with {name} {_shown(begun_with.get(name))}, and this is with "
                f"{_shown(now.get(name))}: give the same settings to go on, another -o, or --overwrite"
            )


def _shown(value: object) -> str:
    return "unset" if value is None else msgspec.json.encode(value).decode()
