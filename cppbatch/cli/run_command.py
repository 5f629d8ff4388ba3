"""`cppbatch run`: the chat, with the arguments of `ollama run`."""

from __future__ import annotations

import click


@click.command(
    context_settings={
        "ignore_unknown_options": True,
        "allow_interspersed_args": False,
        "help_option_names": ["-h", "--help"],
    },
    options_metavar="",
)
@click.argument("model", metavar="MODEL")
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[PROMPT]... [OPTIONS]")
def run(*, model: str, words: tuple[str, ...]) -> None:
    """Chat with a model, or answer PROMPT and end.

    The same as `cppbatch chat -m MODEL`, or with a PROMPT `cppbatch generate -m MODEL --chat -p PROMPT`; OPTIONS are
    those of the command.
    """
    from cppbatch.cli.chat_command import chat
    from cppbatch.cli.generate_command import generate

    if model.startswith("-"):
        raise click.UsageError(f"{model} comes before the model; write: cppbatch run MODEL [PROMPT] {model} ...")
    n_prompt = next((i for i, word in enumerate(words) if word.startswith("-")), len(words))
    prompt, options = " ".join(words[:n_prompt]), words[n_prompt:]
    command, given = (generate, ["--chat", "-p", prompt]) if prompt else (chat, [])
    context = click.get_current_context()
    command.main(["-m", model, *given, *options], prog_name=context.command_path, standalone_mode=False)
