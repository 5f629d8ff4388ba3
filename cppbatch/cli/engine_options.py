"""Options of the engine, named as in llama.cpp: its settings, where it runs, and the checks before it is loaded."""

from __future__ import annotations

import contextlib
import csv
import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec
from click.core import ParameterSource

from cppbatch.config import (
    CHOICES,
    CPU_PARTS,
    KINDS,
    OPTIONS,
    SETTINGS,
    EngineConfig,
    disk_folder,
    setting_name,
)
from cppbatch.errors import ConfigError
from cppbatch.setting import INT32_MAX, env_of

if TYPE_CHECKING:
    from cppbatch.cluster.deployment import Deployment
    from cppbatch.models.attention_times import RequestSizes

Command = Callable[..., Any]
Option = Callable[[Command], Command]

_DEFAULTS = EngineConfig(model_path="")


class _Option(click.Option):
    """An option whose switches are read from variables as llama.cpp reads them."""

    def resolve_envvar_value(self, ctx: click.Context) -> str | None:
        """Reads switches as llama.cpp does: `enabled`, `disabled`, and LLAMA_ARG_NO_X turns off that of LLAMA_ARG_X."""
        value = super().resolve_envvar_value(ctx)
        if not self.is_flag or not isinstance(self.envvar, list):
            return value
        if any(_negation(name) in os.environ for name in self.envvar):
            return "false"
        return {"enabled": "true", "disabled": "false"}.get(value or "", value)


def _negation(variable: str) -> str:
    return variable.replace("LLAMA_ARG_", "LLAMA_ARG_NO_", 1) if variable.startswith("LLAMA_ARG_") else ""


def option(*names: str, env: str = "", llama_env: str = "", **settings: Any) -> Option:
    """An option that can also be set by the environment variable CPPBATCH_<env>, or else by llama.cpp's variable.
    `env`: "": the first long flag. `llama_env`: one or more of llama.cpp's variables, separated by spaces."""
    variables = [f"CPPBATCH_{env or env_of(names)}", *llama_env.split()]
    return click.option(*names, cls=_Option, envvar=variables, show_envvar=True, **{"show_default": True, **settings})


class Choice(click.Choice[str]):
    """A choice that also accepts llama.cpp's names of its values, and either _ or - in them."""

    def __init__(self, choices: Sequence[str], words: Mapping[str, str] = {}) -> None:
        super().__init__(choices)
        self._words = {**{each.replace("_", "-"): each for each in choices}, **words}

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Replaces llama.cpp's names before click checks the value."""
        return super().convert(self._words.get(value.replace("_", "-"), value), param, ctx)

    def normalize_choice(self, choice: object, ctx: click.Context | None) -> str:
        """Unchanged: `cppbatch serve` normalises _ to - in flags, but types such as q8_0 have _."""
        return str(choice)


class Switch(Choice):
    """A choice of on and off, and usually auto."""

    WORDS = ("auto", "on", "off")

    def __init__(self, choices: Sequence[str] = WORDS) -> None:
        words = {"enabled": "on", "true": "on", "1": "on", "disabled": "off", "false": "off", "0": "off", "-1": "auto"}
        super().__init__(choices, words)


class _Specs(Choice):
    """A choice that also accepts llama-server's list of sources."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Several sources are `auto`, which includes earlier text, unless all others are of one kind."""
        kinds = {super(_Specs, self).convert(each, param, ctx) for each in value.split(",")} - {"off"}
        models = kinds - {"suffix", "auto"}
        if len(models) == 1 and models.isdisjoint({"draft", "mtp"}):
            return models.pop()
        return kinds.pop() if len(kinds) == 1 else "auto" if kinds else "off"


class _Layers(click.types.IntParamType):
    """A number of layers, or llama.cpp's words: auto, which is -1, and all."""

    def __init__(self, every: int) -> None:
        """`every`: the number for all layers."""
        super().__init__()
        self._words = {"auto": -1, "all": every}

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        return self._words[value] if value in self._words else int(super().convert(value, param, ctx))


def split_lists(_context: object, _option: object, given: tuple[str, ...]) -> tuple[str, ...]:
    """The values of an option that may be repeated or given as a comma-separated list."""
    values = tuple(item.strip() for each in given for item in each.split(",") if item.strip())
    if given and not values:
        raise click.BadParameter("is empty")
    return values


def with_options(command: Command, options: Sequence[Option]) -> Command:
    """Adds options to a command; --help shows them in this order."""
    for add in reversed(options):
        command = add(command)
    return command


def _scaled_files(_context: object, _option: object, given: tuple[str, ...]) -> tuple[tuple[str, float], ...]:
    lists = ([each] if Path(each).is_file() else each.split(",") for each in given)  # a file name may contain a comma
    return tuple(_scaled_file(each) for files in lists for each in files)


def _file(_context: object, option: click.Parameter, given: str) -> str:
    from cppbatch.models.find import check_file

    path = Path(given).expanduser()
    if given and not os.path.exists(path):  # `check_file` would refer to the list of models, which has no such files
        raise ConfigError(f"{setting_name(str(option.name))}: file not found: {path}; give the path of a GGUF file")
    return str(check_file(path)) if given else ""


def _scaled_file(given: str) -> tuple[str, float]:
    """`FILE`, `FILE:SCALE` or `FILE=SCALE`, as a file and a scale. A file name may contain : and =."""
    for separator in "=:":
        path, _, scale = given.rpartition(separator)
        if path and not Path(given).is_file():
            with contextlib.suppress(ValueError):  # not a number: part of the name
                return path, float(scale)
    return given, 1.0


def _overrides(_context: object, _option: object, given: tuple[str, ...]) -> tuple[str, ...]:
    """Splits at commas, except within double quotes."""
    return tuple(each for row in csv.reader(given) for each in row)


def _or_none(_context: object, _option: object, given: tuple[int, ...] | None) -> tuple[int, ...]:
    return given or ()


def _not_negative(_context: object, _option: object, given: int) -> int:
    """llama-server's -1 means automatic, as 0 does."""
    return max(0, given)


def _parallel(context: click.Context, option: click.Parameter, given: int) -> int:
    """llama-server's -1 means automatic, as if it were not given."""
    if given != -1:
        return given
    context.set_parameter_source(str(option.name), ParameterSource.DEFAULT)
    return _DEFAULTS.n_parallel


def _cache_ram(_context: object, _option: object, given: int) -> int:
    """llama-server's -1 means no limit."""
    return INT32_MAX if given == -1 else given  # MiB: no limit


def _disk_folder(_context: object, _option: object, given: str) -> str:
    """Refuses an unwritable folder at startup, even if the model is loaded later."""
    if folder := disk_folder(given):
        from cppbatch.engine.disk.folder import PrefixFolder  # imports numpy

        PrefixFolder(*folder)
    return given


def _is_on(_context: object, _option: object, given: str) -> bool:
    return given == "on"


def _comma_list(_context: object, _option: object, given: str) -> tuple[str, ...]:
    return tuple(each.strip() for each in given.split(",")) if given else ()


def _numbers(of_text: Callable[[str], float], example: str) -> Callable[[object, object, str], tuple[float, ...]]:
    """The callback of an option with a list of numbers: `3,1` or, as in llama.cpp, `3/1`."""

    def convert(_context: object, _option: object, given: str) -> tuple[float, ...]:
        try:
            return tuple(of_text(each) for each in given.replace("/", ",").split(",")) if given else ()
        except ValueError:
            raise click.BadParameter(f"{given!r} is not a comma-separated list of numbers, such as {example}") from None

    return convert


_SPEC_TYPES = {
    "none": "off", "draft-simple": "draft", "draft-mtp": "mtp",
    "draft-eagle3": "eagle3", "draft-dflash": "dflash", "draft-dspark": "dflash",
    **dict.fromkeys(("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache"), "suffix"),
}  # fmt: skip
"""llama-server's --spec-type."""

_MODEL = [
    option(
        "-m", "--model", llama_env="LLAMA_ARG_MODEL", metavar="FILE|NAME",
        help="GGUF file, a name from `cppbatch models list`, or OWNER/REPO:TYPE to download from the Hugging Face hub. "
        "Default: the only model in the models folder, otherwise the default model, which is downloaded.",
    ),
    option(
        "-hf", "-hfr", "--hf-repo", "hf_repo", llama_env="LLAMA_ARG_HF_REPO",
        metavar="OWNER/REPO[:TYPE]", default=None,
        help="Model on the Hugging Face hub, as for -m. Default TYPE: Q4_K_M, if available.",
    ),
    option(
        "-hff", "--hf-file", "hf_file", llama_env="LLAMA_ARG_HF_FILE", metavar="FILE.gguf",
        default=None, help="A specific file in that repository, instead of TYPE.",
    ),
    option(
        "-hft", "--hf-token", "hf_token", metavar="TOKEN", default=None,
        help="Access token for the Hugging Face hub. Default: HF_TOKEN, which other programs cannot read.",
    ),
    option(
        "-hfd", "-hfrd", "--hf-repo-draft", "--spec-draft-hf", "hf_repo_draft",
        llama_env="LLAMA_ARG_SPEC_DRAFT_HF_REPO", metavar="OWNER/REPO[:TYPE]", default=None,
        help="Draft model on the hub, as for -hf.",
    ),
    option(
        "-mu", "--model-url", "model_url", llama_env="LLAMA_ARG_MODEL_URL", metavar="URL", default=None,
        help="Address of a GGUF file to download; for a split model, of its first part.",
    ),
    option(
        "-dr", "--docker-repo", "docker_repo", llama_env="LLAMA_ARG_DOCKER_REPO", metavar="[REPO/]MODEL[:TAG]",
        default=None, help="Model in Docker Hub's registry, as for -m docker://REPO/MODEL. Default REPO: ai.",
    ),
    option(
        "-mmu", "--mmproj-url", "mmproj_url", llama_env="LLAMA_ARG_MMPROJ_URL", metavar="URL", default=None,
        help="As --mmproj, from an address.",
    ),
    option(
        "--mmproj-auto/--no-mmproj", " /--no-mmproj-auto", "mmproj_auto",
        llama_env="LLAMA_ARG_MMPROJ_AUTO", default=True,
        help="Download and load the projector in the repository of a hub model, as with --mmproj.",
    ),
]  # fmt: skip

_CONVERSIONS: dict[str, dict[str, Any]] = {
    "n_ctx": {"show_default": "1,024 per sequence, on a GPU more, or what fits into memory"},
    "n_threads": {"callback": _not_negative},
    "flash_attn": {"is_flag": False, "flag_value": "on"},
    "n_parallel": {"callback": _parallel, "show_default": "16, on a GPU 32, or what fits into memory"},
    "n_gpu_layers": {"type": _Layers(-2)},
    "draft_gpu_layers": {"type": _Layers(-1)},
    "kv_layout": {
        "type": Choice(
            CHOICES["kv_layout"], {"true": "unified", "1": "unified", "false": "per-sequence", "0": "per-sequence"}
        )
    },
    "spec": {"type": _Specs(CHOICES["spec"], _SPEC_TYPES)},
    "rpc": {"default": "", "callback": _comma_list},
    "tensor_split": {"default": "", "callback": _numbers(float, "3,1")},
    "fit_params": {"is_flag": False, "type": Switch(("on", "off")), "default": "on", "callback": _is_on},
    "fit_target": {"default": "", "callback": _numbers(int, "1024,2048")},
    "device_names": {"default": "", "callback": _comma_list},
    "override_tensor": {"multiple": True, "callback": split_lists},
    "draft_device_names": {"default": "", "callback": _comma_list},
    "draft_override_tensor": {"multiple": True, "callback": split_lists},
    "lora": {"multiple": True, "callback": _scaled_files},
    "kv_overrides": {"multiple": True, "callback": _overrides},
    "control_vectors": {"multiple": True, "callback": _scaled_files},
    "control_vector_layers": {"nargs": 2, "type": int, "default": None, "callback": _or_none},
    "mmproj": {"callback": _file},
    "draft_model": {"callback": _file},
    "prefix_cache_ram": {"callback": _cache_ram},
    "prefix_cache_disk": {"callback": _disk_folder},
}
"""Where the command line differs from `EngineConfig`."""


def _setting(name: str) -> Option:
    """The option of a setting, as `cppbatch.config` declares it."""
    setting, kind, default = SETTINGS[name], KINDS[name], getattr(_DEFAULTS, name)
    how: dict[str, Any] = {"default": default, "show_default": default not in ("", ())}
    if name in CHOICES:
        how["type"] = Switch() if CHOICES[name] == Switch.WORDS else Choice(CHOICES[name])
    elif kind is bool:
        how["is_flag"] = True
    elif kind in (int, float):
        how["type"] = kind
    return option(
        *setting.flags.split(), name, llama_env=setting.llama_env, metavar=setting.metavar or None,
        help=setting.help, **how | _CONVERSIONS.get(name, {}),
    )  # fmt: skip


_SETTINGS = [_setting(name) for name in OPTIONS]


class _ModelName(click.ParamType):  # type: ignore[type-arg]
    """A model given with -m. The environment variable holds a single one, whose path may contain spaces."""

    name = "text"

    def split_envvar_value(self, rv: str) -> Sequence[str]:
        """Keeps spaces: the variable names one model."""
        return [rv]


def _several(named: Option) -> Option:
    """The option, made repeatable."""

    def add(command: Command) -> Command:
        added = named(command)
        parameter = added.__click_params__[-1]  # type: ignore[attr-defined]  # where click collects them
        parameter.multiple, parameter.type, parameter.default = True, _ModelName(), ()
        return added

    return add


def engine_options(command: Command, *, without: Collection[str] = (), several: bool = False) -> Command:
    """Adds the options of the engine's settings. The command gets `config`, an `EngineConfig`.

    `without`: fields of `EngineConfig` that the command sets itself; they get no option. `several`: the command accepts
    several models. It gets `sources` from an outer decorator: where the models are, or None for a single model. With
    several models, `config` has no model.
    """

    @wraps(command)
    def with_config(
        *,
        model: str | tuple[str, ...] | None,
        hf_repo: str | None,
        hf_file: str | None,
        verbose: bool,
        hf_token: str | None = None,
        hf_repo_draft: str | None = None,
        model_url: str | None = None,
        docker_repo: str | None = None,
        mmproj_url: str | None = None,
        mmproj_auto: bool = False,
        **arguments: Any,
    ) -> Any:
        from cppbatch.models.pull import choose_model, choose_projector, projector_at

        named = model if isinstance(model, tuple) else (model,) if model else ()
        if hf_token:
            os.environ["HF_TOKEN"] = hf_token  # where the hub's client reads it

        log_settings = {name: arguments.pop(name) for name in _LOG_SETTINGS if name in arguments}
        _set_up_logs(verbose, log_settings)
        settings = {name: arguments.pop(name) for name in EngineConfig.__struct_fields__ if name in arguments}
        for prefix in ("", "draft_"):
            _put_in_order(settings, prefix)
        if settings.get("n_ctx_seq") and {"n_ctx", "n_parallel"} & given_settings() == {"n_parallel"}:
            settings["n_ctx"] = settings["n_ctx_seq"] * settings["n_parallel"]
            click.get_current_context().set_parameter_source("n_ctx", ParameterSource.COMMANDLINE)
        sizes = {"n_ctx": settings.get("n_ctx") or _DEFAULTS.n_ctx}  # 0 is resolved once the model is known
        EngineConfig(model_path="", **{**settings, **sizes})  # raises for wrong values before a model is downloaded
        if model_url and not any(map(os.path.isfile, named)):  # -m is where llama-server would put it
            named = (model_url,)
        if docker_repo:
            named = (f"docker://{docker_repo}",)
        named = (*([on_hub] if (on_hub := hub_name(hf_repo, hf_file)) else []), *named)
        if several:
            sources = arguments["sources"]
            if len(named) > 1 or sources.folder or sources.settings_file:
                own_contexts = settings.get("n_ctx") == 0
                arguments["sources"] = sources.with_files(named, own_contexts=own_contexts, projectors=mmproj_auto)
                return command(config=EngineConfig(model_path="", **{**settings, **sizes}), **arguments)
            arguments["sources"] = None
        if hf_repo_draft and not settings.get("draft_model"):
            settings["draft_model"] = str(choose_model(hub_name(hf_repo_draft, None)))
        if mmproj_url and not settings.get("mmproj"):
            settings["mmproj"] = str(projector_at(mmproj_url))
        if named and mmproj_auto and may_see(named[-1], settings):
            settings["mmproj"] = str(choose_projector(named[-1]) or "")
        model_path = str(choose_model(named[-1] if named else None))
        return command(config=config_of(model_path, settings), **arguments)

    verbose = click.option("-v", "--verbose", "--log-verbose", "verbose", is_flag=True, help="Show llama.cpp's log.")
    named, *hub = _MODEL
    return _leave_out(
        without, with_options(with_config, [_several(named) if several else named, *hub, *_SETTINGS, verbose])
    )


def _put_in_order(settings: dict[str, Any], prefix: str) -> None:
    """The first match counts, as in llama-server: -cmoe, -ncmoe and -ncffn before an -ot become its first patterns."""
    from cppbatch.llama.placement import cpu_overrides

    context = click.get_current_context()
    order = list(context.params)  # flags as given, then variables, which llama-server reads first

    def rank(name: str) -> tuple[bool, int]:
        return context.get_parameter_source(name) is ParameterSource.COMMANDLINE, order.index(name)

    tensors = f"{prefix}override_tensor"
    if not settings.get(tensors):
        return
    parts: dict[str, Any] = dict.fromkeys(CPU_PARTS, 0)
    for part in CPU_PARTS:
        name = f"{prefix}{part}"
        if settings.get(name) and rank(name) < rank(tensors):
            parts[part], settings[name] = settings[name], getattr(_DEFAULTS, name)
    first = [f"{pattern}={place}" for pattern, place in cpu_overrides(**parts)]
    settings[tensors] = (*first, *settings[tensors])


def config_of(model_path: str, settings: dict[str, Any]) -> EngineConfig:
    """The settings of a model, with its own context length in place of -c 0. Raises `ConfigError`, `ModelError`."""
    if settings.get("n_ctx") == 0:
        settings = {**settings, "n_ctx": context_length(Path(model_path))}
    return EngineConfig(model_path=model_path, **settings)


def context_length(path: Path) -> int:
    """The context length of a model, for -c 0. Raises `ModelError`."""
    from cppbatch.models.inspect import inspect_model

    return inspect_model(path).n_ctx_train or _DEFAULTS.n_ctx


def engine_settings_options(command: Command, *, without: Collection[str] = ()) -> Command:
    """Adds the options of the engine's settings, except the model. The command gets `engine`, their values.

    `without`: fields that the command sets itself; they get no option.
    """

    @wraps(command)
    def with_engine(**arguments: Any) -> Any:
        engine = {name: arguments.pop(name) for name in EngineConfig.__struct_fields__ if name in arguments}
        return command(engine=engine, **arguments)

    return _leave_out(without, with_options(with_engine, _SETTINGS))


def _leave_out(names: Collection[str], command: Command) -> Command:
    options: list[click.Parameter] = command.__click_params__  # type: ignore[attr-defined]  # where click collects them
    without = {*names, *(other for name in names for other in _SETS.get(name, ()))}
    options[:] = [each for each in options if each.name not in without]
    return command


_SETS = {"mmproj": ("mmproj_auto", "mmproj_url"), "draft_model": ("hf_repo_draft",)}
"""Options of the hub and of addresses that set an engine setting."""


def given_settings() -> set[str]:
    """The names of the engine's settings that the user has given, by flag or environment variable."""
    context = click.get_current_context()
    given = (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT)
    return {name for name in EngineConfig.__struct_fields__ if context.get_parameter_source(name) in given}


_LOG_SETTINGS = ("log_format", "log_level", "access_log", "log_file")


def _set_up_logs(verbose: bool, settings: dict[str, Any]) -> None:
    """`settings`: the server's `_LOG_SETTINGS`; empty for other commands."""
    if settings:
        from cppbatch.server.observe.log_setup import set_up

        set_up(
            settings["log_format"],
            verbose=verbose,
            level=settings["log_level"],
            access=settings["access_log"],
            file=settings["log_file"],
        )
        return
    logging.basicConfig(
        level=logging.DEBUG if verbose else logging.WARNING, format="%(levelname)s %(name)s: %(message)s"
    )


# --- before it is loaded ----------------------------------------------------------------------------------------------

_PROFILE_AND_MEMORY = [
    option(
        "--profile/--no-profile", "use_profile", default=True,
        help="Use the settings found by `cppbatch tune` unless overridden by flags.",
    ),
    option(
        "--memory-check/--no-memory-check", "memory_check", default=True,
        help="Refuse to start if the settings need more memory than is free.",
    ),
]  # fmt: skip


def profile_and_memory_flags(command: Command) -> Command:
    """Adds --no-profile and --no-memory-check. The command gets `use_profile` and `memory_check`."""
    return with_options(command, _PROFILE_AND_MEMORY)


def profile_and_memory_options(
    command: Command,
    *,
    says_start: Callable[[], bool] = lambda: True,
    to_stderr: bool = True,
    sizes_of: Callable[[Mapping[str, Any], EngineConfig], RequestSizes | None] | None = None,
) -> Command:
    """Adds --no-profile and --no-memory-check. The command gets its `config` with the profile's settings or sizes that
    fit, checked against free memory. If `says_start()`, prints what runs where; `to_stderr`: to stderr. `sizes_of`: the
    sizes of the requests that the command's arguments name."""

    @wraps(command)
    def with_checked_config(config: EngineConfig, use_profile: bool, memory_check: bool, **arguments: Any) -> Any:
        from cppbatch.cli.plan_start import plan_start

        if sources := arguments.get("sources"):  # each model is checked when it is loaded
            arguments["sources"] = msgspec.structs.replace(sources, use_profiles=use_profile, memory_check=memory_check)
            return command(config=config, **arguments)
        deployment: Deployment | None = arguments.get("deployment")
        if config.rpc:
            if deployment:
                deployment.configs(config)  # raises before any waiting
            _wait_for_rpc_workers(config)
        asked = config
        config = plan_start(
            config,
            given_settings(),
            deployment.configs if deployment else lambda one: [one],
            use_profile=use_profile,
            memory_check=memory_check,
            say=partial(click.echo, err=to_stderr),
            says_start=says_start(),
            sizes=sizes_of(arguments, config) if sizes_of else None,
        )
        if deployment:
            arguments["deployment"] = _watching_memory(deployment, asked, memory_check=memory_check)
        return command(config=config, **arguments)

    return with_options(with_checked_config, _PROFILE_AND_MEMORY)


def _wait_for_rpc_workers(config: EngineConfig) -> None:
    from cppbatch.rpc_endpoint import parse_endpoint, wait_for_workers

    endpoints = [parse_endpoint(each) for each in config.rpc]
    # machines switched on together take different times to boot
    wait_for_workers(endpoints, 60.0, lambda line: click.echo(line, err=True))


def _watching_memory(deployment: Deployment, asked: EngineConfig, *, memory_check: bool) -> Deployment:
    from cppbatch.sizing.fit_again import refit
    from cppbatch.sizing.memory_check import memory_shortage

    return msgspec.structs.replace(
        deployment, refit=refit(asked), memory_shortage=memory_shortage if memory_check else None
    )


# --- models of the hub ------------------------------------------------------------------------------------------------
# -hf, -hff and --mmproj-auto.


def hub_name(repository: str | None, file: str | None) -> str | None:
    """The name of the model given by -hf and -hff; None: neither is given."""
    if file and not repository:
        raise click.UsageError(f"-hff {file} requires -hf OWNER/REPO")
    if not repository:
        return None
    from cppbatch.models.hub import hub_model

    name = f"{repository.partition(':')[0]}:{file}" if file else repository
    if hub_model(name) is None:
        raise click.BadParameter(f"{repository!r} is not OWNER/REPO or OWNER/REPO:TYPE", param_hint="-hf")
    return name


def may_see(name: str, settings: Mapping[str, Any]) -> bool:
    """Whether to load the projector from the model's hub repository, given these engine settings."""
    from cppbatch.models.hub import hub_model

    is_text_only = settings.get("pooling") or settings.get("deterministic")
    if not hub_model(name) or settings["mmproj"] or is_text_only:
        return False
    from cppbatch.llama.media_encoder import has_mtmd  # loads llama.cpp's library

    return has_mtmd()
