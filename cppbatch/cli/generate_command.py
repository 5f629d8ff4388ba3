"""`cppbatch generate`."""

from __future__ import annotations

import sys
from typing import Any, TextIO

import click
import msgspec

from cppbatch.cli.engine_options import engine_options, profile_and_memory_options
from cppbatch.cli.sampling_options import sampling_options
from cppbatch.config import EngineConfig
from cppbatch.engine.params import SamplingParams
from cppbatch.engine.request import FinishReason
from cppbatch.errors import CppBatchError


@click.command()
@click.option("-p", "--prompt", "prompts", multiple=True, metavar="TEXT", help="A prompt; may be given several times.")
@click.option(
    "-f",
    "--file",
    type=click.File(encoding="utf-8-sig"),
    help="File with one prompt per line; - reads the standard input.",
)
@sampling_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line, in the order of the prompts.")
@engine_options
@profile_and_memory_options
def generate(
    config: EngineConfig, prompts: tuple[str, ...], file: TextIO | None, as_json: bool, params: dict[str, Any]
) -> None:
    """Completes prompts, all in one batch."""
    all_prompts = [*prompts, *_lines(file)]
    if not all_prompts:
        raise click.UsageError("no prompt: give -p TEXT (may be repeated), or -f FILE with one prompt per line")
    sampling_params = SamplingParams(**params)

    from cppbatch.engine.engine import BatchInferenceEngine

    with BatchInferenceEngine(config) as engine:
        results = engine.generate(all_prompts, sampling_params, progress=sys.stderr.isatty())
    for i, (prompt, result) in enumerate(zip(all_prompts, results, strict=True)):
        if as_json:
            click.echo(msgspec.json.encode({"index": i, "prompt": prompt, **msgspec.to_builtins(result)}))
        else:
            click.echo(f"{'' if i == 0 else chr(10)}--- {i + 1}: {prompt}\n{result.text}")
    failed = [result for result in results if result.finish_reason is FinishReason.ERROR]
    if failed:
        raise CppBatchError(f"{len(failed)} of {len(results)} prompts failed: {failed[0].error}")


def _lines(file: TextIO | None) -> list[str]:
    return [line.rstrip("\r\n") for line in file if line.strip()] if file else []
