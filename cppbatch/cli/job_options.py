"""The options of `cppbatch batch` that are about its files, and what becomes of their lines."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import click

from cppbatch.cli.engine_options import option
from cppbatch.cli.sampling_options import sampling_options
from cppbatch.engine.params import SamplingParams

Command = Callable[..., Any]

_OPTIONS: list[Callable[[Command], Command]] = [
    click.argument("input_file", metavar="INPUT", type=click.Path(path_type=Path)),
    click.option(
        "-o", "--output", required=True, metavar="OUT.jsonl", type=click.Path(path_type=Path),
        help="Where the results go. What is done so far is known by OUT.jsonl.job beside it.",
    ),
    click.option(
        "--errors", metavar="FILE", type=click.Path(path_type=Path), default=None,
        help="Where lines go that are refused or fail; without it OUT.errors.jsonl.",
    ),
    click.option("--column", default=None, help="The column of a CSV or Parquet file with the prompts; else `prompt`."),
    click.option(
        "--endpoint", type=click.Choice(["completions", "chat", "embeddings"]), default="completions",
        show_default=True,
        help="What mere prompts are for: to be continued, to be answered by the assistant, or to become vectors.",
    ),
    click.option(
        "--system", metavar="TEXT", default=None, help="The system message of each prompt, with --endpoint chat."
    ),
    sampling_options,
    click.option("--ordered", is_flag=True, help="Write the results in the input's order, not as they come."),
    click.option(
        "--longest-first", is_flag=True, help="Begin with long prompts and long answers: a shorter tail."
    ),
    click.option("--retry-failed", is_flag=True, help="Answer again the lines that have failed."),
    click.option("--overwrite", is_flag=True, help="Begin anew, and lose the results so far."),
    option(
        "--chat-template", env="CHAT_TEMPLATE", metavar="NAME|FILE|TEXT", default=None,
        help="Chat template to use instead of the model's own: a name such as chatml, a file, or Jinja itself.",
    ),
]  # fmt: skip


def job_options(command: Command) -> Command:
    """Adds these options; the command gets `job`, a `FileJob`, and the two that are about its beginning."""

    @wraps(command)
    def with_job(
        input_file: Path,
        output: Path,
        errors: Path | None,
        params: dict[str, Any],
        chat_template: str | None,
        **arguments: Any,
    ) -> Any:
        from cppbatch.chat.template import find_template
        from cppbatch.jobs.file_job import FileJob
        from cppbatch.jobs.input_format import detect_input_format

        SamplingParams(**params)  # complains before a model is fetched
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
            chat_template=find_template(chat_template) if chat_template else None,
            ordered=arguments.pop("ordered"),
            longest_first=arguments.pop("longest_first"),
        )
        return command(job=job, **arguments)

    wrapped: Command = with_job
    for add in reversed(_OPTIONS):
        wrapped = add(wrapped)
    return wrapped
