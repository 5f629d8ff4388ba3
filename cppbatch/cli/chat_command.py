"""`cppbatch chat`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import platformdirs
from click.core import ParameterSource

from cppbatch.cli.chat.backends import ChatBackend, EngineBackend, ServerBackend
from cppbatch.cli.engine_options import (
    config_of,
    engine_settings_options,
    given_settings,
    option,
    profile_and_memory_flags,
)
from cppbatch.cli.option_groups import GroupedCommand
from cppbatch.cli.output import loading_bar
from cppbatch.cli.sampling_options import sampling_options
from cppbatch.cli.server_options import chat_template_option
from cppbatch.config import EngineConfig
from cppbatch.engine.params import DEFAULT_MAX_TOKENS, SamplingParams
from cppbatch.errors import CppBatchError
from cppbatch.extras import require

if TYPE_CHECKING:
    from cppbatch.engine.engine import BatchInferenceEngine

_ONE_SEQUENCE = {"n_parallel": 1}  # a conversation has one answer at a time
_OF_THE_ENGINE = {*EngineConfig.__struct_fields__, "chat_template", "use_profile", "memory_check"}
"""Options for loading a model in this process."""


_COMMON = (
    "url api_key model mmproj lora chat_template system save_to continue_from thinking_budget n_ctx n_threads "
    "n_gpu_layers spec draft_model n_predict temperature top_k top_p seed verbose"
)
"""The options that --help shows; --help-all shows all."""


@click.command(
    cls=GroupedCommand,
    common=_COMMON,
    hint="chat takes options only: name the model with -m, and type messages after the start; `cppbatch run MODEL` "
    "starts a chat, and `cppbatch generate PROMPT` answers one prompt",
)
@option(
    "-m", "--model", "-hf", "--hf-repo", "model",
    llama_env="LLAMA_ARG_MODEL LLAMA_ARG_HF_REPO", metavar="FILE|NAME", default=None,
    help="GGUF file, a name from `cppbatch models list`, or OWNER/REPO:TYPE on the Hugging Face hub; with --url, one "
    "of the server's models.",
)  # fmt: skip
@click.option("--url", metavar="URL", default=None, help="Chat with a server instead, such as http://127.0.0.1:8080.")
@option(
    "--api-key", "api_key", env="CHAT_API_KEY", llama_env="CPPBATCH_API_KEY", metavar="KEY", default=None,
    help="API key for that server.",
)  # fmt: skip
@click.option("-np", "--parallel", type=int, expose_value=False, hidden=True)  # a conversation has one answer at a time
@click.option("--system", metavar="TEXT", default=None, help="System message of the chat.")
@click.option(
    "--thinking-budget", "thinking_budget", type=click.IntRange(-1), default=None,
    help="Maximum reasoning tokens before the answer starts. -1: no limit.",
)  # fmt: skip
@click.option(
    "--save", "save_to", type=click.Path(dir_okay=False, path_type=Path), default=None, metavar="FILE",
    help="Save the conversation to this file after each answer: Markdown (.md), or JSON.",
)  # fmt: skip
@click.option(
    "--continue", "continue_from", type=click.Path(dir_okay=False, path_type=Path), default=None, metavar="FILE",
    help="Continue a conversation that was saved as JSON.",
)  # fmt: skip
@sampling_options
@chat_template_option
@partial(engine_settings_options, without=("max_wait_ms", "pooling", *_ONE_SEQUENCE))
@profile_and_memory_flags
@click.option("-v", "--verbose", is_flag=True, help="Show llama.cpp's log.")
def chat(
    *,
    model: str | None,
    url: str | None,
    api_key: str | None,
    system: str | None,
    save_to: Path | None,
    continue_from: Path | None,
    params: dict[str, Any],
    is_capped: bool,
    chat_template: str | None,
    thinking_budget: int | None,
    engine: dict[str, Any],
    use_profile: bool,
    memory_check: bool,
    verbose: bool,
) -> None:
    """Chat in the terminal, with a local model or a server (--url).

    Enter sends a message, Alt-Enter or Ctrl-J starts a new line. Ctrl-C stops an answer, Ctrl-D quits, /help lists the
    commands. If the input is not a terminal, each input line is a message, and only the answers are written.
    """
    from cppbatch.cli.chat.answer_view import TerminalView
    from cppbatch.cli.chat.session import COMMANDS, ChatSession, read_messages
    from cppbatch.cli.chat.terminal import (
        ANSWER_STYLES,
        PlainView,
        TerminalInput,
        is_terminal,
        piped_lines,
        quiet_terminal,
    )

    logging.basicConfig(
        level=logging.DEBUG if verbose else logging.WARNING, format="%(levelname)s %(name)s: %(message)s"
    )
    if is_terminal():
        require("prompt_toolkit", "`cppbatch chat` in a terminal")
    SamplingParams(**params)  # raises for wrong values before a model is loaded
    messages = read_messages(continue_from) if continue_from else []
    longest = DEFAULT_MAX_TOKENS if is_capped else None
    options = {} if thinking_budget is None else {"thinking_budget": thinking_budget}
    backend: ChatBackend
    if url:
        _refuse_engine_options()
        source = click.get_current_context().get_parameter_source("model")
        on_server = (
            model if source is ParameterSource.COMMANDLINE else None
        )  # the environment variable names a local model
        backend = ServerBackend(url, model=on_server, api_key=api_key, **options)
    else:
        plan = partial(
            _plan, settings={**engine, **_ONE_SEQUENCE}, given=given_settings() | set(_ONE_SEQUENCE),
            use_profile=use_profile, memory_check=memory_check, says_start=is_terminal(),
        )  # fmt: skip
        backend = EngineBackend(partial(_load, plan), model, chat_template=chat_template, **options)
    try:
        if not is_terminal():
            session = ChatSession(backend, PlainView(), system=system, params=params, longest=longest, save_to=save_to)
            session.take_up(messages)
            session.say_what_model_lacks()
            for line in piped_lines():
                if not session.handle(line):
                    break
            if session.n_failed:
                raise CppBatchError(f"{session.n_failed} of the messages failed")
            return

        from rich.console import Console

        view = TerminalView(Console(highlight=False, theme=ANSWER_STYLES))
        view.say(f"chatting with {backend.model}. /help lists the commands, Alt-Enter starts a new line, Ctrl-D quits.")
        session = ChatSession(backend, view, system=system, params=params, longest=longest, save_to=save_to)
        session.take_up(messages)
        session.say_what_model_lacks()
        if messages:
            view.say(f"{len(messages)} messages from {continue_from}")
        history = Path(platformdirs.user_state_dir("cppbatch")) / "chat_history"
        with quiet_terminal():
            for line in TerminalInput(COMMANDS, history, view.say):
                try:
                    if not session.handle(line):
                        break
                except KeyboardInterrupt:  # while a stopped answer is ending
                    continue
    finally:
        backend.close()


def _refuse_engine_options() -> None:
    context = click.get_current_context()
    for each in context.command.params:
        if each.name in _OF_THE_ENGINE and context.get_parameter_source(each.name) is ParameterSource.COMMANDLINE:
            raise click.UsageError(
                f"{each.opts[0]} applies to a model in this process; it cannot be combined with --url"
            )


def _plan(
    path: str, *, settings: dict[str, Any], given: set[str], use_profile: bool, memory_check: bool, says_start: bool
) -> EngineConfig:
    from cppbatch.cli.plan_start import plan_start

    return plan_start(
        config_of(path, settings), given, lambda one: [one],
        use_profile=use_profile, memory_check=memory_check, says_start=says_start, say=partial(click.echo, err=True),
    )  # fmt: skip


def _load(plan: Callable[[str], EngineConfig], named: str | None) -> BatchInferenceEngine:
    from cppbatch.engine.engine import BatchInferenceEngine
    from cppbatch.models.pull import choose_model

    loaded = 0.0

    def on_progress(fraction: float) -> bool:
        nonlocal loaded
        loaded = fraction
        return True

    config = plan(str(choose_model(named)))
    with loading_bar(lambda: loaded):
        return BatchInferenceEngine(config, progress=on_progress)
