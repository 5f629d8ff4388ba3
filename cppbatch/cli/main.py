"""`cppbatch`: the command group, and exit codes."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping

import click

from cppbatch.cli.quiet_imports import QuietImports
from cppbatch.errors import CppBatchError

_MODULES = {
    "serve": "serve_command", "generate": "generate_command", "chat": "chat_command", "batch": "batch_command",
    "models": "models_command", "memory": "memory_command", "tune": "tune_command", "bench": "bench_commands",
    "doctor": "doctor_command", "rpc-worker": "rpc_worker_command", "ray": "ray_command",
}  # fmt: skip


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


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="cppbatch")
def cli() -> None:
    """Run GGUF models in batches on this machine."""


cli.commands = _Commands()  # type: ignore[assignment]  # nothing is added to it


def main() -> None:
    """Entry point. A `CppBatchError` is one line on stderr and exit code 2; an interrupt is exit code 130."""
    try:
        cli(standalone_mode=False)
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
