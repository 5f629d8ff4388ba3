"""`cppbatch`: the command group, and exit codes."""

from __future__ import annotations

import sys

import click

import cppbatch
from cppbatch.cli.batch_command import batch
from cppbatch.cli.bench_commands import bench
from cppbatch.cli.chat_command import chat
from cppbatch.cli.doctor_command import doctor
from cppbatch.cli.generate_command import generate
from cppbatch.cli.memory_command import memory
from cppbatch.cli.models_command import models
from cppbatch.cli.ray_command import ray
from cppbatch.cli.rpc_worker_command import rpc_worker
from cppbatch.cli.serve_command import serve
from cppbatch.cli.tune_command import tune
from cppbatch.errors import CppBatchError


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(cppbatch.__version__)
def cli() -> None:
    """Runs GGUF models in batches on this machine."""


cli.add_command(serve)
cli.add_command(generate)
cli.add_command(chat)
cli.add_command(batch)
cli.add_command(models)
cli.add_command(memory)
cli.add_command(tune)
cli.add_command(bench)
cli.add_command(doctor)
cli.add_command(rpc_worker)
cli.add_command(ray)


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
