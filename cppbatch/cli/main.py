"""`cppbatch`: the command group, and exit codes."""

from __future__ import annotations

import errno
import importlib
import os
import sys
from collections.abc import Iterator, Mapping

import click

from cppbatch.cli.quiet_imports import QuietImports
from cppbatch.cluster.worker import process
from cppbatch.errors import CppBatchError

_MODULES = {
    "serve": "serve_command", "chat": "chat_command", "run": "run_command", "generate": "generate_command",
    "batch": "batch_command", "models": "models_command", "doctor": "doctor_command", "memory": "memory_command",
    "tune": "tune_command", "bench": "bench_commands", "rpc-worker": "rpc_worker_command", "ray": "ray_command",
}  # fmt: skip

_HELP = {"-h", "--help", "--help-all"}


class _Commands(Mapping[str, click.Command]):
    """The commands, each imported on lookup: importing all of them takes as long as loading a small model."""

    def __getitem__(self, name: str) -> click.Command:
        with QuietImports():
            module = importlib.import_module(f"cppbatch.cli.{_MODULES[name]}")
        command: click.Command = getattr(module, name.replace("-", "_"))
        return command

    def __iter__(self) -> Iterator[str]:
        return iter(_MODULES)

    def __len__(self) -> int:
        return len(_MODULES)


class _Group(click.Group):
    """Lists the commands in the order of `_MODULES`, the most used first."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="cppbatch")
def cli() -> None:
    """Run GGUF models in batches on this machine."""


cli.commands = _Commands()  # type: ignore[assignment]  # nothing is added to it


def main() -> None:
    """Entry point. A `CppBatchError` is one line on stderr and exit code 2; an interrupt is exit code 130. Errors of
    the system, such as a full disk, are one line and exit code 1."""
    _open_closed_streams()
    try:
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy starts them on import, and has no matrices here
        if sys.argv[1:2] == ["serve"] and _HELP.isdisjoint(sys.argv):
            process.start_early()  # it imports in parallel with this process
        cli(standalone_mode=False)
        sys.stdout.flush()
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(130)
    except BrokenPipeError:  # the program that reads the output (head, less) has ended
        sys.stderr.close()
        sys.exit(141)
    except CppBatchError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(2)
    except OSError as error:
        click.echo(f"error: {_describe(error)}", err=True)
        _discard_output()
        sys.exit(1)
    except RuntimeError as error:  # of platformdirs and pathlib
        if "home directory" not in str(error).lower():
            raise
        click.echo(
            "error: this user has no home directory; set HOME, or CPPBATCH_MODELS, CPPBATCH_CONFIG, XDG_DATA_HOME, "
            "XDG_CONFIG_HOME, XDG_CACHE_HOME and XDG_STATE_HOME, to folders",
            err=True,
        )
        sys.exit(2)


def _open_closed_streams() -> None:
    """Discards the output to streams that the shell has closed (>&-); Python sets them to None."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 (open until the process ends)


def _describe(error: OSError) -> str:
    where = "" if error.filename is None else f"{error.filename}: "
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    remedy = "; free some space, or write the output to another disk" if is_full else ""
    return f"{where}{error.strerror or error}{remedy}"


def _discard_output() -> None:
    """Drops the output that cannot be written: Python would try again at its end, and report that."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
