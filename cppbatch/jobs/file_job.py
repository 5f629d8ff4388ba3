"""A job of `cppbatch batch`: one input file, one output file, one error file, and the ledger next to the output."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping
from itertools import combinations
from pathlib import Path

import msgspec

from cppbatch.errors import ConfigError, InUse, StorageError
from cppbatch.jobs.database import IN_MEMORY
from cppbatch.jobs.durable_files import DurableFile, beside, storage_error, uncommitted_path
from cppbatch.jobs.input.format import InputFormat, unreadable_file
from cppbatch.jobs.input.parquet import import_pyarrow
from cppbatch.jobs.input.reader import InputReader
from cppbatch.jobs.job_request import Json
from cppbatch.jobs.journal import Journal
from cppbatch.jobs.ledger import Ledger
from cppbatch.regular_files import is_model, is_same_file, is_special, is_stream

_SETTINGS_NOTE = "settings"
_MODEL_NOTE = "weights"
_FILES_NOTE = "files"
_TABLES = (".csv", ".tsv", ".parquet", ".pq")
_OTHER_FORMATS = (".xlsx", ".xls", ".ods", ".txt", ".md")


class FileJob(msgspec.Struct, frozen=True, kw_only=True):
    """The files and settings of a job.

    Raises `ConfigError` if two of the files are the same, if one to write is a model, a device of the wrong kind or has
    a name that is too long, or if the output has the extension of an unsupported format.
    """

    input_format: InputFormat
    output: Path
    errors: Path
    """For rejected and failed lines; created for the first one. The same as `output` if that is a stream."""
    defaults: Json = {}
    """Default body fields of requests."""
    plain_max_tokens: int | None = None
    """Token limit of a plain prompt without its own. None: up to the context size."""
    chat_template: str | None = None
    """The template's text; None: the model's own."""
    model_changes: Json = {}
    """The given settings that change what the model computes."""
    ordered: bool = False
    """Write results in input order instead of as they arrive."""
    longest_first: bool = False
    """Start with the requests with the most prompt and output tokens."""
    assumed: frozenset[str] = frozenset()
    """Names of settings with default values. A job started by an earlier version keeps the defaults of that version."""

    def __post_init__(self) -> None:
        files = self._files()
        for name, path in files.items():
            self._check_file(name, path)
        for (one, path), (other, other_path) in combinations({"the input": self.input_format.path, **files}.items(), 2):
            if is_same_file(path, other_path) and not is_stream(path):
                raise ConfigError(f"{one} and {other} are the same file, {path}; give another name")
        self._check_folders()
        if self.output.suffix.lower() in _OTHER_FORMATS:
            better = self.output.with_suffix(".jsonl")
            raise ConfigError(
                f"-o is {self.output}; results are written as JSON Lines, CSV or Parquet: use {better}, or "
                "the extension .csv"
            )
        if self.output.suffix.lower() in (".parquet", ".pq"):
            import_pyarrow()  # raises before anything runs

    def _check_folders(self) -> None:
        """Raises `ConfigError` if the job would write files among those that it reads."""
        if self.input_format.kind != "files":
            return
        source, folder = self.input_format.path, Path(os.path.realpath(self.input_format.path))
        inputs = {folder / name for name in self.input_format.files}
        for name, path in {"-o": self.output, "--errors": self.errors}.items():
            real = Path(os.path.realpath(path))
            if real in inputs or (self.is_folder and real in folder.parents):
                raise ConfigError(f"{name} is {path}, which has an input of the job; give another name")
            if self.input_format.whole_folder and real.is_relative_to(folder):
                raise ConfigError(f"{name} is {path}, which is in the input folder {source}; give a name outside it")

    def _files(self) -> dict[str, Path]:
        """The files that the job writes or deletes, by their names in messages."""
        files = {"-o": self.output, "--errors": self.errors}
        if not self.is_stream:
            files |= {"the ledger": self.ledger, "the ledger's log": beside(self.ledger, "-wal")}
            files["the file of uncommitted results"] = uncommitted_path(self.results)
        if not is_stream(self.errors):
            files["the file of uncommitted errors"] = uncommitted_path(self.errors)
        if self.is_written_at_end:
            files |= {
                "the results before the table": self.results,
                "the unfinished table": beside(self.output, ".part"),
            }
        return files

    def _check_file(self, name: str, path: Path) -> None:
        try:
            os.stat(path)
        except OSError as error:
            unusable = {errno.ENAMETOOLONG: "is too long for its folder", errno.ELOOP: "is a link that leads to itself"}
            if error.errno in unusable:
                text = f"{name}: the name {path.name} {unusable[error.errno]}; give another name"
                raise ConfigError(text) from None
        may_stream = name in ("-o", "--errors") and not self.is_written_at_end
        if is_special(path) and not (may_stream and is_stream(path)):
            raise ConfigError(f"{name} is {path}, which is not a regular file: give another name")
        if is_model(path):
            raise ConfigError(f"{name} is {path}, a model file, which is never overwritten: give another name")

    @property
    def is_folder(self) -> bool:
        """Whether the output is a folder with an answer for each file: it has no extension, or is one already."""
        if self.input_format.kind != "files" or is_stream(self.output) or is_special(self.output):
            return False
        return self.output.is_dir() or not (self.output.suffix or self.output.exists())

    @property
    def is_written_at_end(self) -> bool:
        """Whether the output is a CSV or Parquet file, or a folder: it is made of the results when all are there."""
        return is_table(self.output) or self.is_folder

    @property
    def is_stream(self) -> bool:
        """Whether the results are written to a pipe, a device or standard output. Such a job cannot be resumed."""
        return not self.is_written_at_end and is_stream(self.output)

    @property
    def results(self) -> Path:
        """The JSON Lines file to which results are written as they arrive; the output itself unless it is written at
        the end."""
        return beside(self.output, ".jsonl") if self.is_written_at_end else self.output

    @property
    def ledger(self) -> Path:
        """The path of the ledger."""
        return IN_MEMORY if self.is_stream else beside(self.output, ".job")

    def settings(self, model: str) -> Json:
        """The settings that affect the results. They must be the same when a job resumes."""
        form = {
            name: getattr(self.input_format, name) for name in ("endpoint", "column", "template", "id_column", "system")
        }
        form |= {"ids": "line"} if self.input_format.by_line else {}
        ours = {"chat template": self.chat_template, "ordered": self.ordered, "errors": self.errors_beside_output}
        return {
            "model": _as_text(Path(model).name),
            **form,
            **ours,
            "max_tokens": self.plain_max_tokens,
            **self.model_changes,
            **self.defaults,
        }

    @property
    def errors_beside_output(self) -> str:
        """The error file relative to the output's folder, so that the path stays valid if the folder is moved."""
        output, errors = (Path(os.path.realpath(path)) for path in (self.output, self.errors))
        folder = output.parent
        return _as_text(str(errors.relative_to(folder) if errors.is_relative_to(folder) else errors))


def _as_text(name: str) -> str:
    """A file name for the ledger: names that are not UTF-8 have escapes."""
    return name.encode(errors="backslashreplace").decode()


def is_table(output: Path) -> bool:
    """Whether a file with this name is a table."""
    return output.suffix.lower() in _TABLES


def open_job(
    job: FileJob, model: str, *, overwrite: bool = False, retry_failed: bool = False, say: Callable[[str], None]
) -> Journal:
    """Starts a job with this model, or resumes it. `say` receives messages for the user.

    `overwrite`: starts over and deletes previous results. `retry_failed`: runs failed lines again. Raises `ConfigError`
    if files exist that do not belong to the job, `StorageError` if the ledger is in use, corrupt or on a full disk.
    """
    if overwrite:
        _check_input(job)
        _remove(job, *(() if job.is_folder else (job.output,)), job.results, job.errors)
    elif job.ledger.exists() and not job.results.exists():
        say(f"{job.results} is missing: starting over")
        _remove(job, *_previous_error_files(job))
    if not job.ledger.exists():
        _reject_existing_files(job)
    ledger = Ledger(job.ledger)
    try:
        _check_settings(job, model, ledger)
        if job.input_format.kind == "files":
            ledger.set_note(_FILES_NOTE, {"names": job.input_format.files})
        if ledger.n_completed or ledger.n_failed:
            say(f"resuming: {ledger.n_completed} lines are done, {ledger.n_failed} have failed")
        if retry_failed and ledger.n_failed:
            say("retrying the failed lines")
            _reopen_failed(job, ledger)
        return Journal(ledger, job.results, job.errors, ordered=job.ordered, streams=True)
    except BaseException:
        ledger.close()
        raise


def _reopen_failed(job: FileJob, ledger: Ledger) -> None:
    """Reopens the failed lines and empties their file: what it has beyond its committed size was not committed."""
    has_file = job.errors.exists() and not is_stream(job.errors)
    if has_file:
        size = min(ledger.number("error_bytes"), job.errors.stat().st_size)  # it may have been emptied by hand
        DurableFile(job.errors, size).close()  # keeps lines that were not committed
    ledger.reopen_failed()
    try:
        if has_file:
            os.truncate(job.errors, 0)
    except OSError as error:
        raise storage_error(job.errors, error) from error


def begun_with(job: FileJob, note: str = _SETTINGS_NOTE) -> Json:
    """The settings of the results so far, or another note of their ledger; empty if there are none."""
    if not (job.ledger.exists() and job.results.exists()):
        return {}
    ledger = Ledger(job.ledger)
    try:
        return (ledger.note(note) if ledger.n_completed or ledger.n_failed else None) or {}
    finally:
        ledger.close()


def named(job: FileJob, *, overwrite: bool, say: Callable[[str], None]) -> FileJob:
    """The job with results that are named by line if the column `id` of its input cannot name them, unless its results
    so far are named by it; of files, those without a result come after the others. Raises `ConfigError` if the input
    cannot be read."""
    if job.input_format.kind == "files":
        known = [] if overwrite else begun_with(job, _FILES_NOTE).get("names", [])
        if known and set(known).isdisjoint(job.input_format.files):
            raise ConfigError(
                f"{job.output} was started with other files than {job.input_format.path} has: choose another -o, or "
                "use --overwrite"
            )
        names = tuple(dict.fromkeys([*known, *job.input_format.files]))
        return msgspec.structs.replace(job, input_format=msgspec.structs.replace(job.input_format, files=names))
    if begun := {} if overwrite else begun_with(job):
        by_line = begun.get("ids") == "line"
    else:
        problem = InputReader(job.input_format, ()).id_problem()
        by_line = problem is not None
        if problem:
            say(f"id: {problem}; the results are named by line instead (line-1 ...), unless you give --id-column id")
    return msgspec.structs.replace(job, input_format=msgspec.structs.replace(job.input_format, by_line=by_line))


def as_begun(job: FileJob, *, say: Callable[[str], None]) -> FileJob:
    """The job with the default settings of the earlier version that wrote its results so far, if they differ."""
    now = job.settings("")
    begun = begun_with(job) or now
    other = {name: begun.get(name) for name in job.assumed if begun.get(name) != now.get(name)}
    if not other:
        return job
    shown = " and ".join(f"{name} {_json_or_unset(value)}" for name, value in sorted(other.items()))
    say(f"the job was started with {shown}, the default of an earlier version, and continues with it")
    kept = {name: other.get(name, value) for name, value in job.defaults.items()}
    return msgspec.structs.replace(
        job,
        defaults={name: value for name, value in kept.items() if value is not None},
        plain_max_tokens=other.get("max_tokens", job.plain_max_tokens),
    )


def _previous_error_files(job: FileJob) -> list[Path]:
    """The error file if the job has used it before; otherwise none, because the file may not belong to the job."""
    ledger = Ledger(job.ledger)
    try:
        previous = ledger.note(_SETTINGS_NOTE) or {}
    finally:
        ledger.close()
    return [job.errors] if previous.get("errors") == job.errors_beside_output else []


def _check_input(job: FileJob) -> None:
    """Raises `ConfigError` if the input cannot be opened, before any results are deleted."""
    path = job.input_format.path
    if path.is_dir():  # it was listed just before
        return
    try:
        path.open("rb").close()
    except (OSError, ValueError) as error:  # ValueError: an invalid path, for example with a null byte
        raise unreadable_file(path, error) from None


def _remove(job: FileJob, *files: Path) -> None:
    """Deletes the ledger and these files, except streams. Links stay, and their files are deleted.

    Raises `InUse` if another process has locked the ledger.
    """
    try:
        if job.ledger.exists():
            Ledger(job.ledger).close()
    except InUse:
        raise
    except StorageError:  # a corrupt ledger can be deleted too
        pass
    files = tuple(path for path in files if not is_stream(path))
    ledger = () if job.is_stream else (job.ledger, *(beside(job.ledger, suffix) for suffix in ("-wal", "-shm")))
    for path in (*ledger, *files, *map(uncommitted_path, files)):
        try:
            Path(os.path.realpath(path)).unlink(missing_ok=True)
        except OSError as error:
            raise storage_error(path, error) from error


def _reject_existing_files(job: FileJob) -> None:
    for path in dict.fromkeys((job.output, job.results, job.errors)):
        if job.is_folder and path == job.output and path.exists() and not any(path.iterdir()):
            continue
        if not is_stream(path) and path.exists() and (not path.is_file() or path.stat().st_size):
            if job.is_stream:
                raise ConfigError(f"{path} already exists: choose another --errors, or use --overwrite")
            raise ConfigError(
                f"{path} already exists, but its job cannot be resumed ({job.ledger.name} is missing): choose another "
                "-o, or use --overwrite"
            )


def _check_settings(job: FileJob, model: str, ledger: Ledger) -> None:
    previous, settings = ledger.note(_SETTINGS_NOTE), job.settings(model)
    if previous is None or not (ledger.n_completed or ledger.n_failed):  # no result depends on the previous ones
        ledger.set_note(_SETTINGS_NOTE, settings)
        return
    for name in {**previous, **settings}:
        if previous.get(name) != settings.get(name):
            same = f"-m {Path(model).with_name(previous['model'])}" if name == "model" else "the same settings"
            raise ConfigError(
                f"{job.output} was started with {name} {_json_or_unset(previous.get(name))}, but {name} is now "
                f"{_json_or_unset(settings.get(name))}: use {same} to resume, choose another -o, or use --overwrite"
            )


def check_model(journal: Journal, model: str, digest: str, others: Mapping[str, str] | None = None) -> None:
    """Called before a job's lines are run, with the model's `model_digest`, and `others`: adapters, control vectors and
    the projector, with theirs. Raises `ConfigError` if its results are of another file of the same name."""
    ledger, of_others = journal.ledger, {Path(path).name: digest for path, digest in (others or {}).items()}
    begun = ledger.note(_MODEL_NOTE)
    if begun is None or not ledger.n_completed:
        ledger.set_note(_MODEL_NOTE, {"digest": digest, "others": of_others})
        return
    before = begun.get("others", {})
    changed = [model] if begun["digest"] != digest else []
    changed += [path for path, now in (others or {}).items() if before.get(Path(path).name, now) != now]
    if changed:
        raise ConfigError(
            f"the job was started with another file named {Path(changed[0]).name} than {changed[0]}: use that file to "
            "resume, choose another -o, or use --overwrite"
        )


def _json_or_unset(value: object) -> str:
    return "unset" if value is None else msgspec.json.encode(value).decode()
