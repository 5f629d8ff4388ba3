"""`--help` in groups: the long list of options under headings."""

from __future__ import annotations

import copy
import difflib
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import click

from cppbatch.config import OPTIONS, SETTINGS
from cppbatch.engine.params import PARAMS

_GROUPS = {  # *: the engine's settings under this heading
    "Input and output": "prompts file images sounds as_chat as_json output errors column id_column template endpoint "
    "raw system save_to continue_from ordered longest_first retry_failed overwrite",
    "Model": "model hf_repo hf_file hf_token hf_repo_draft model_url docker_repo * mmproj_url mmproj_auto "
    "chat_template template_variables reasoning reasoning_effort reasoning_format preserves_reasoning thinking_tokens "
    "thinking_budget thinking_message skip_chat_parsing prefill_assistant parse_special spm_infill embd_normalize",
    "Batch and memory": "* memory_check",
    "Speed": "* use_profile",
    "Speculative decoding": "*",
    "Several models": "models_dir models_config llama_cpp_python_config models_max models_memory models_autoload "
    "any_model",
    "Workers and devices": "workers downscale_delay devices list_devices * ray_address replicas step_timeout "
    "sleep_idle_seconds in_process",
    "Network and keys": "url api_key hosts port reuse_port prefix api_keys api_key_file ssl_certfile ssl_keyfile "
    "cors_origins cors_methods cors_headers cors_credentials allowed_hosts",
    "Limits": "* max_concurrent max_concurrent_per_key request_timeout idle_timeout sse_ping_interval drain_timeout "
    "max_tokens max_n max_prompts_per_batch max_body_mb max_file_mb max_media max_media_mb",
    "Names, files and endpoints": "aliases tags strict_model data_dir slot_save_path allowed_media_domains media_path "
    "video_fps video_timestamp_interval video_ffmpeg_dir "
    "metrics slots props webui static_path",
    "Sampling": f"n_predict {' '.join(PARAMS)} json_schema json_schema_file guided_choice grammar grammar_file "
    "compact_json logit_bias stop shows_special escapes",
    "Log and debugging": "log_level access_log log_format log_file prompts_dir verbose * version cache_list "
    "completion_bash usage",
}


def _settings(heading: str) -> str:
    return " ".join(name for name in OPTIONS if SETTINGS[name].group == heading)


GROUPS: Mapping[str, str] = {heading: names.replace("*", _settings(heading)) for heading, names in _GROUPS.items()}
"""Headings with the parameter names of their options, in the order of `--help`."""

_OTHERS = "Other options"
_HELP_ALL = "help_all"


class GroupedCommand(click.Command):
    """A command whose `--help` shows its options under the headings of `GROUPS`.

    `common`: the names of the options in `--help`; --help-all shows all. "": `--help` shows all. `argument`: the option
    that words without one belong to; "": they are refused, with `hint` as the message.
    """

    def __init__(self, *args: Any, common: str = "", argument: str = "", hint: str = "", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._argument, self._hint = argument, hint
        self.common = common.split()
        """The names of the options that `--help` shows; empty: all."""
        if common:
            self.params.append(
                click.Option(
                    ["--help-all"], is_flag=True, is_eager=True, expose_value=False, callback=_show_all,
                    help="Show all options, with their environment variables.",
                )
            )  # fmt: skip

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Refuses an unknown `-nzz` as a whole, which click splits into `-n zz`.

        A value may be attached to a one-letter flag that takes a text (`-mmodel.gguf`), or a number if it starts like
        one (`-n64`). One-letter flags without a value may be joined.
        """
        options = {
            name: each
            for each in self.get_params(ctx)
            if isinstance(each, click.Option)
            for name in (*each.opts, *each.secondary_opts)
        }
        words, named = deque(args), list[str]()
        while words:
            word = words.popleft()
            is_value = not word.startswith("-") or word == "-"
            if is_value and self._hint:
                raise click.UsageError(self._hint, ctx)
            named += [self._argument, word] if is_value and self._argument else [word]
            name, equals, _ = word.partition("=")
            normalize = ctx.token_normalize_func or str
            option = options.get(name) or options.get(normalize(name))
            if word == "--":
                named += words
                break
            takes_value = option and not (option.is_flag or equals)
            if takes_value or (not option and _ends_with_option(word, options)):
                has_none = getattr(option, "_flag_needs_value", False) and words and words[0].startswith("-")
                for _ in range(0 if has_none else min(len(words), option.nargs if option else 1)):
                    named.append(words.popleft())
            elif not option and _LETTERS.match(word) and not _may_be_split(word, options):
                close = difflib.get_close_matches(name, options)  # older versions of click list all they get
                raise click.NoSuchOption(name, possibilities=close, ctx=ctx)
        return super().parse_args(ctx, named)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes a section for each heading."""
        for heading, options in group_options(self.get_params(ctx)):
            is_whole = not self.common or heading == _OTHERS or _HELP_ALL in ctx.meta
            shown = options if is_whole else [_briefly(option) for option in options if option.name in self.common]
            records = [record for option in shown if (record := option.get_help_record(ctx))]
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)


def _briefly(option: click.Parameter) -> click.Parameter:
    """The option with the first sentence of its help, and without other names and environment variables."""
    brief = copy.copy(option)
    if isinstance(brief, click.Option) and brief.help:
        brief.help, brief.show_envvar = brief.help.split(". ", 1)[0].removesuffix(".") + ".", False
        short, long = ([name for name in brief.opts if name.startswith("--") == is_long] for is_long in (False, True))
        brief.opts = [*short[:1], *long[:1]]
    return brief


_LETTERS = re.compile(r"-[A-Za-z].")


def _may_be_split(word: str, options: Mapping[str, click.Option]) -> bool:
    """Whether a word is one-letter flags, of which the last one may have a value."""
    for i, letter in enumerate(word[1:], 2):
        option = options.get(f"-{letter}")
        if option is None:
            return False
        if not option.is_flag:
            return not isinstance(option.type, _NUMBERS) or word[i:][:1] in _NUMBER_STARTS
    return True


def _ends_with_option(word: str, options: Mapping[str, click.Option]) -> bool:
    """Whether a word is joined one-letter flags, and an option whose value is the next word."""
    if not re.fullmatch("-[A-Za-z]{2,}", word):
        return False
    *flags, last = (options.get(f"-{letter}") for letter in word[1:])
    return bool(last and not last.is_flag and all(each and each.is_flag for each in flags))


_NUMBERS = (type(click.INT), type(click.FLOAT))
_NUMBER_STARTS = {*"-+.0123456789", ""}


def _show_all(ctx: click.Context, _option: object, given: bool) -> None:
    if given and not ctx.resilient_parsing:
        ctx.meta[_HELP_ALL] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


def group_options(options: Iterable[click.Parameter]) -> Iterator[tuple[str, list[click.Parameter]]]:
    """Yields each heading with its options, in the order of `GROUPS`; ungrouped options come last."""
    left = {option.name: option for option in options}
    for heading, names in GROUPS.items():
        yield heading, [left.pop(name) for name in names.split() if name in left]
    yield _OTHERS, list(left.values())
