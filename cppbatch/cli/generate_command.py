"""`cppbatch generate`."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any, TextIO

import click
import msgspec

from cppbatch.cli.engine_options import engine_options, profile_and_memory_options
from cppbatch.cli.option_groups import GroupedCommand
from cppbatch.cli.output import loading_bar
from cppbatch.cli.sampling_options import sampling_options
from cppbatch.cli.server_options import are_chats, chat_template_option
from cppbatch.config import EngineConfig
from cppbatch.engine.chat_results import ChatEvent
from cppbatch.engine.params import DEFAULT_MAX_TOKENS, UNLIMITED, sampling_params
from cppbatch.engine.request import Completion, FinishReason, GenerationEvent, completion
from cppbatch.errors import CppBatchError, InvalidRequest
from cppbatch.typed_json import encode_line

_ITEM = re.compile(r"^(?:prompts|conversations)\[(\d+)\]")


def _is_terminal() -> bool:
    return sys.stderr.isatty()


_COMMON = (
    "prompts file images as_chat as_json model hf_repo mmproj lora chat_template system n_parallel n_ctx "
    "n_threads n_gpu_layers spec draft_model n_predict temperature top_k top_p seed json_schema grammar stop verbose"
)
"""The options that --help shows; --help-all shows all."""


@click.command(cls=GroupedCommand, common=_COMMON, argument="-p", options_metavar="[OPTIONS] [PROMPT]...")
@click.option("-p", "--prompt", "prompts", multiple=True, metavar="TEXT", help="A prompt; may be repeated.")
@click.option(
    "-f",
    "--file",
    type=click.File(encoding="utf-8-sig"),
    help="File with one prompt per line; - reads standard input.",
)
@click.option(
    "--chat/--raw", "as_chat", default=None,
    help="Treat each prompt as a user message, or continue it as is.  [default: --chat, if the model has a chat "
    "template]",
)  # fmt: skip
@click.option("--system", metavar="TEXT", default=None, help="System message of each chat.")
@click.option(
    "--image", "images", type=click.Path(exists=True, dir_okay=False), multiple=True, metavar="FILE",
    help="Image to put before each chat prompt, with --mmproj; may be repeated.",
)  # fmt: skip
@click.option(
    "--audio", "sounds", type=click.Path(exists=True, dir_okay=False), multiple=True, metavar="FILE",
    help="Audio to put before each chat prompt, with --mmproj; may be repeated.",
)  # fmt: skip
@sampling_options
@chat_template_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line, in the order of the prompts.")
@partial(engine_options, without=("max_wait_ms",))
@partial(profile_and_memory_options, says_start=_is_terminal)
def generate(
    *,
    config: EngineConfig,
    prompts: tuple[str, ...],
    file: TextIO | None,
    as_chat: bool | None,
    system: str | None,
    images: tuple[str, ...],
    sounds: tuple[str, ...],
    chat_template: str | None,
    as_json: bool,
    params: dict[str, Any],
    is_capped: bool,
) -> None:
    """Answer prompts, and print the texts as they are generated.

    They run in one batch. If the model has a chat template, each prompt is a user message; --raw continues it as is.
    Ctrl-C prints what was generated so far.
    """
    all_prompts = [*prompts, *_lines(file)]
    if not all_prompts:
        raise click.UsageError("no prompt given; give it in quotes, or -f FILE with one prompt per line")
    if "" in all_prompts and not (images or sounds):
        raise click.UsageError(f"prompt {all_prompts.index('') + 1} is empty; give it a text")
    if system is not None or images or sounds:
        if as_chat is False:
            raise click.UsageError("--system, --image and --audio apply to chats only: leave out --raw")
        as_chat = True
    wanted = sampling_params(({} if is_capped else {"max_tokens": UNLIMITED}) | params)
    as_chat = are_chats(config, chat_template, as_chat, says=_is_terminal())

    from cppbatch.engine.engine import BatchInferenceEngine

    printer: _Printer = _JsonPrinter(all_prompts) if as_json else _TextPrinter(all_prompts)
    shows_progress = sys.stderr.isatty() and not sys.stdout.isatty()  # a bar between the texts would garble them
    loaded = 0.0

    def on_progress(fraction: float) -> bool:
        nonlocal loaded
        loaded = fraction
        return True

    with loading_bar(lambda: loaded):
        loaded_engine = BatchInferenceEngine(config, progress=on_progress)
    with loaded_engine as engine:
        try:
            results: Sequence[Completion]
            if as_chat:
                results = engine.chat(
                    _conversations(all_prompts, images, sounds), wanted, system=system,
                    chat_template=chat_template, progress=shows_progress, on_event=printer.add,
                )  # fmt: skip
            else:
                results = engine.generate(all_prompts, wanted, progress=shows_progress, on_event=printer.add)
        except KeyboardInterrupt:
            printer.interrupt()
            raise
        except InvalidRequest as error:  # -p and -f have prompts, not "conversations[0]: ..."
            raise CppBatchError(_ITEM.sub(lambda item: f"prompt {int(item[1]) + 1}", str(error))) from error
    _say_why_texts_end(results, is_capped=is_capped)
    failed = [result for result in results if result.finish_reason is FinishReason.ERROR]
    if failed:
        raise CppBatchError(f"{len(failed)} of {len(results)} prompts failed: {failed[0].error}")


def _conversations(
    prompts: Sequence[str], images: Sequence[str], sounds: Sequence[str]
) -> Sequence[str | list[dict[str, Any]]]:
    """Each prompt as a user message, preceded by these files."""
    if not images and not sounds:
        return prompts
    image_parts = [{"type": "image", "path": path} for path in images]
    files = [*image_parts, *({"type": "audio", "path": path} for path in sounds)]
    return [[{"role": "user", "content": [*files, {"type": "text", "text": prompt}]}] for prompt in prompts]


class _Printer:
    """Prints the results in the order of the prompts, as they become available."""

    def __init__(self, prompts: Sequence[str]) -> None:
        self._prompts = prompts
        self._events: list[list[GenerationEvent | ChatEvent]] = [[] for _ in prompts]
        self._current = 0
        self._is_interrupted = False

    def add(self, index: int, event: GenerationEvent | ChatEvent) -> None:
        """Handles an event of a prompt."""
        self._events[index].append(event)
        self._print()

    def interrupt(self) -> None:
        """Prints what has been generated for all prompts."""
        self._is_interrupted = True
        self._print()

    def _print(self) -> None:
        while self._current < len(self._prompts):
            events = self._events[self._current]
            has_ended = bool(events) and _is_last(events[-1])
            self._show(events, has_ended=has_ended)
            if not has_ended and not self._is_interrupted:
                return
            self._current += 1

    def _show(self, events: list[GenerationEvent | ChatEvent], *, has_ended: bool) -> None:
        """Prints the current prompt's result."""
        raise NotImplementedError


class _TextPrinter(_Printer):
    """Prints each text as it grows, and the next one once it is complete."""

    _n_shown = 0  # events of the current prompt

    def _show(self, events: list[GenerationEvent | ChatEvent], *, has_ended: bool) -> None:
        if events and not self._n_shown:
            click.echo(f"{chr(10) if self._current else ''}--- {self._current + 1}: {self._prompts[self._current]}")
        click.echo("".join(event.text for event in events[self._n_shown :]), nl=False)
        self._n_shown = len(events)
        if events and (has_ended or self._is_interrupted):
            click.echo()
            self._n_shown = 0


class _JsonPrinter(_Printer):
    """One JSON object per prompt. After an interrupt, objects of unfinished texts have no `usage`."""

    def _show(self, events: list[GenerationEvent | ChatEvent], *, has_ended: bool) -> None:
        if has_ended:
            result = msgspec.to_builtins(_result(events))
        elif self._is_interrupted:
            text, tokens = "".join(e.text for e in events), [token for e in events for token in e.tokens]
            result = {"text": text, "tokens": tokens, "finish_reason": FinishReason.CANCELLED.value}
        else:
            return
        click.echo(encode_line({"index": self._current, "prompt": self._prompts[self._current], **result}))


def _is_last(event: GenerationEvent | ChatEvent) -> bool:
    return (event.finish_reason if isinstance(event, GenerationEvent) else event.completion) is not None


def _result(events: Sequence[GenerationEvent | ChatEvent]) -> Completion:
    last = events[-1]
    if isinstance(last, GenerationEvent):
        return completion([event for event in events if isinstance(event, GenerationEvent)])
    assert last.completion
    return last.completion


def _say_why_texts_end(results: Sequence[Completion], *, is_capped: bool) -> None:
    n_cut = sum(result.finish_reason is FinishReason.LENGTH for result in results)
    if is_capped and n_cut:
        limit = f"{DEFAULT_MAX_TOKENS:,} tokens or when the context was full"
        line = (
            f"{n_cut} of {len(results)} texts were cut off after {limit}: change the limit with -n N, or remove it "
            "with -n -1"
        )
        click.echo(line, err=True)
    for i, result in enumerate(results):
        if not result.tokens and result.finish_reason is FinishReason.STOP:
            click.echo(f"{i + 1}: no text: the model ended it with its first token", err=True)


def _lines(file: TextIO | None) -> list[str]:
    try:
        return [line.rstrip("\r\n") for line in file if line.strip()] if file else []
    except UnicodeDecodeError as error:
        raise click.UsageError(
            f"-f {file.name if file else ''} is not UTF-8 text ({error}); save it as UTF-8"
        ) from error
