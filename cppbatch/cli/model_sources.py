"""Where a server with several models finds them: options, and the catalog built from them."""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from cppbatch.cli.engine_options import Command, hub_name, option, with_options
from cppbatch.cli.llama_cpp_python_config import read_llama_cpp_python_config, use_config
from cppbatch.config import EngineConfig
from cppbatch.errors import ConfigError
from cppbatch.models.find import models_in, short_name, shorter_names
from cppbatch.models.hub import hub_model, present_file, projector_beside
from cppbatch.models.pull import choose_model, choose_projector, is_downloaded, projector_at

if TYPE_CHECKING:
    from cppbatch.cli.model_settings import ModelFile, ModelSettings
    from cppbatch.cluster.deployment import Deployment
    from cppbatch.server.models.loader import ModelSpec
    from cppbatch.server.models.many import CatalogContent, ManyModels
    from cppbatch.server.settings import ServerSettings

log = logging.getLogger("cppbatch.flags")

_HUB_KEYS = ("hf-repo", "hf", "hfr")
_HUB_FILE_KEYS = ("hf-file", "hff")
_URL_KEYS = ("model-url", "mu")
_DOCKER_KEYS = ("docker-repo", "dr")
_FILE_KEYS = ("model", "m", *_HUB_KEYS, *_HUB_FILE_KEYS, *_URL_KEYS, *_DOCKER_KEYS)
"""The keys that name a model's file in its section of the settings file."""
_ALIAS_KEYS = ("alias", "a")
_NO_MMPROJ_KEYS = ("no-mmproj", "no-mmproj-auto", "mmproj-auto")
_ELSEWHERE: tuple[tuple[str, tuple[str, ...], Callable[[str], Path]], ...] = (
    ("mmproj", ("mmproj-url", "mmu"), projector_at),
    ("draft-model", ("hf-repo-draft", "hfd", "hfrd", "spec-draft-hf"), choose_model),
)
"""Keys that name a file at an address or on the hub: the setting, the keys, what finds the file."""
_MMPROJ_KEYS = {"mmproj", "mm", "mmproj-url", "mmu", *_NO_MMPROJ_KEYS}


class ModelSources(msgspec.Struct, frozen=True, kw_only=True):
    """The given options of a server with several models."""

    files: tuple[Path, ...] = ()
    """From several -m."""
    folder: Path | None = None
    settings_file: Path | None = None
    is_llama_cpp_python: bool = False
    """The settings file is one of llama-cpp-python's server."""
    max_loaded: int = 0
    memory_mib: int | None = None
    autoload: bool = True
    any_model: bool = False
    use_profiles: bool = True
    memory_check: bool = True
    own_contexts: bool = False
    """-c 0: each model gets KV cells for its own context length, unless its settings say otherwise."""
    projectors: bool = True
    """Whether a model in a folder of its own gets the projector beside it."""

    def with_files(self, named: Sequence[str], *, own_contexts: bool, projectors: bool) -> ModelSources:
        """The sources plus the models of -m, downloaded if necessary. Raises `ModelError`."""
        files = tuple(map(choose_model, named))
        return msgspec.structs.replace(self, files=files, own_contexts=own_contexts, projectors=projectors)


_OPTIONS = [
    option(
        "--models-dir", llama_env="LLAMA_ARG_MODELS_DIR", metavar="DIR", default=None,
        type=click.Path(path_type=Path, exists=True, file_okay=False),
        help="Serve all GGUF models in this folder: the `model` field of a request selects one, and it is loaded on "
        "first use (docs/models.md). Giving -m several times does the same.",
    ),
    option(
        "--models-config", "--models-preset", "models_config",
        llama_env="LLAMA_ARG_MODELS_PRESET", metavar="FILE.toml", default=None,
        type=click.Path(path_type=Path, exists=True, dir_okay=False),
        help="Settings for each model, with flag names as keys; or FILE.ini in the format of llama-server's presets.",
    ),
    option(
        "--llama-cpp-python-config", metavar="FILE", default=None, is_eager=True,
        type=click.Path(path_type=Path, exists=True, dir_okay=False), callback=use_config,
        help="A --config_file of llama-cpp-python's server (JSON or YAML): serves its models, and uses its host, port, "
        "key and certificate as defaults (docs/migration.md).",
    ),
    option(
        "--models-max", llama_env="LLAMA_ARG_MODELS_MAX", type=click.IntRange(min=0), default=0,
        help="Maximum number of loaded models; 0: as many as fit into memory.",
    ),
    option(
        "--models-memory", type=click.IntRange(min=1), default=None, metavar="MIB",
        help="Memory limit for all loaded models together. Default: free memory.",
    ),
    option(
        "--models-autoload/--no-models-autoload", llama_env="LLAMA_ARG_MODELS_AUTOLOAD",
        default=True, help="Load models on request; otherwise only POST /models/load loads them.",
    ),
    option(
        "--any-model", is_flag=True,
        help="With several models: use the default model for unknown model names. By default, they are refused with "
        "404.",
    ),
]  # fmt: skip


def model_source_options(command: Command) -> Command:
    """Adds the options for several models. The command gets `sources`; None without a folder and a file."""

    @wraps(command)
    def with_sources(
        *,
        models_dir: Path | None,
        models_config: Path | None,
        llama_cpp_python_config: Path | None,
        models_max: int,
        models_memory: int | None,
        models_autoload: bool,
        any_model: bool,
        **arguments: Any,
    ) -> Any:
        if models_config and llama_cpp_python_config:
            raise ConfigError("--models-config and --llama-cpp-python-config cannot be combined; give only one of them")
        sources = ModelSources(
            folder=models_dir,
            settings_file=models_config or llama_cpp_python_config,
            is_llama_cpp_python=llama_cpp_python_config is not None,
            max_loaded=models_max,
            memory_mib=models_memory,
            autoload=models_autoload,
            any_model=any_model,
        )
        return command(sources=sources, **arguments)

    return with_options(with_sources, _OPTIONS)


class Catalog:
    """A `cppbatch.server.models.many.ModelCatalog`: the models of the sources, with their settings."""

    def __init__(
        self,
        sources: ModelSources,
        config: EngineConfig,
        given: set[str],
        deployment: Deployment,
        settings: ServerSettings,
    ) -> None:
        """`config`, `deployment`, `settings`: for models without settings of their own. `given`: the settings of
        `config` that the user has given. Raises `ConfigError` for settings that only apply to a single model."""
        _refuse("--in-process", deployment.in_process)
        _refuse("--rpc", bool(config.rpc))
        _refuse("--alias", bool(settings.aliases))
        self._sources, self._config, self._given = sources, config, given
        self._deployment, self._settings = deployment, settings
        self._reading = threading.Lock()
        self._missing: dict[str, list[Callable[[], object]]] = {}
        """What downloads the files of the models that have some elsewhere."""
        self._projectors: dict[str, Path | None] = {}
        """The projectors of models of the hub."""
        self._meant: dict[str, Path] = {}
        """The file of every name that a model has had, also of the names without a weight type."""

    def read(self) -> CatalogContent:
        """The current models. Downloads nothing. Raises `ConfigError` and `ModelError`."""
        with self._reading:
            return self._read()

    def fetch(self, name: str) -> None:
        """Downloads the files of a model that are elsewhere."""
        for download in self._missing.get(name, ()):
            download()

    def _read(self) -> CatalogContent:
        from cppbatch.cli.model_settings import ModelFile, parse_settings, read_settings
        from cppbatch.server.models.many import CatalogContent

        self._missing = {}
        file = self._sources.settings_file
        if file and self._sources.is_llama_cpp_python:
            content = read_llama_cpp_python_config(file).models
        else:
            content = read_settings(file) if file else ModelFile()
        with_file = {
            name: self._path_of(name, settings)
            for name, settings in content.models.items()
            if not settings.keys().isdisjoint(_FILE_KEYS)
        }
        paths = self._paths(with_file, _aliases_in(content))
        own = {
            name if name in with_file else self._name_in(paths, name): settings
            for name, settings in content.models.items()
        }
        for name in [each for each in own if each not in paths]:
            paths[name] = with_file.get(name) or self._path_of(name, own[name])
        specs = []
        parsed: dict[str, ModelSettings] = {}  # most models of a folder have the same settings
        sizes = {"ctx-size": 0} if self._sources.own_contexts else {}
        for name, path in paths.items():
            given = {**sizes, **content.defaults, **own.get(name, {})}
            pinned, preload = _take_switch(given, "pinned", name), _take_switch(given, "load-on-startup", name)
            if projector := self._projectors.get(name):
                given["mmproj"] = str(projector)
            is_named = not _MMPROJ_KEYS.isdisjoint(given)
            for key in (*_FILE_KEYS, *_NO_MMPROJ_KEYS):
                given.pop(key, None)
            self._use_files_elsewhere(name, given)
            if given.pop("stop-timeout", None) is not None:
                log.info(
                    "stop-timeout: no effect; a model is unloaded when its last request ends, however long that takes"
                )
            if (key := repr(given)) not in parsed:
                parsed[key] = parse_settings(given, f"--models-config, model {name!r}")
            spec = self._spec(name, path, parsed[key])
            if not is_named and (projector := self._beside(path, spec.config)):
                with_projector = msgspec.structs.replace(spec.config, mmproj=str(projector))
                spec = msgspec.structs.replace(spec, config=with_projector)
            is_elsewhere = name in self._missing
            specs.append(msgspec.structs.replace(spec, pinned=pinned, preload=preload, is_elsewhere=is_elsewhere))
        _check_aliases(specs)
        self._remember(paths)
        return CatalogContent(specs, self._default(content, [spec.name for spec in specs]))

    def _use_files_elsewhere(self, name: str, given: dict[str, Any]) -> None:
        """Replaces the settings of a model that name a file at an address or on the hub by its path, once it is
        downloaded."""
        for setting, keys, find in _ELSEWHERE:
            if named := next((str(given.pop(key)) for key in keys if key in given), None):
                if is_downloaded(named):
                    given.setdefault(setting, str(find(named)))
                else:
                    self._missing.setdefault(name, []).append(partial(find, named))

    def _paths(self, with_file: dict[str, Path], aliases: dict[str, str]) -> dict[str, Path]:
        """The files from flags and folder, by model name.

        `with_file`: models whose file is named in the settings file; they keep their names. `aliases`: {alias in the
        settings file: its model}. Of several files named with -m, the later ones are prefixed with their folder. Those
        in the folder never get a name that has meant another file, so that a key or a batch never means a file that
        was added later: a file directly in the folder comes before those in other folders, and a name that several of
        these would have is prefixed for each of them.
        """
        root, paths = self._sources.folder, dict[str, Path]()

        def is_free(name: str, path: Path) -> bool:
            is_reserved = name in with_file and os.path.realpath(with_file[name]) != os.path.realpath(path)
            return name not in paths and not is_reserved

        for path in dict.fromkeys(self._sources.files):
            name = next((each for each in _names(path, path.parent.name) if is_free(each, path)), None)
            if name is None:
                raise ConfigError(f"the name {short_name(path)!r} of {path} is used for other models; rename the file")
            paths[name] = path
        if root is None:
            return paths

        found = [path for path in models_in(root) if path not in paths.values()]
        n_named = Counter(short_name(path) for path in found if path.parent != root)
        named = {path: name for name, path in reversed(self._meant.items())}  # its own name comes first
        for path in sorted(found, key=lambda path: (path not in named, path.parent != root)):
            is_below = path.parent != root
            prefix = path.parent.relative_to(root).as_posix() if is_below else root.absolute().name
            names = [*([named[path]] if path in named else []), *_names(path, prefix)]
            if is_below and n_named[short_name(path)] > 1 and path not in named:
                names.remove(short_name(path))
            free = (
                each
                for each in names
                if is_free(each, path) and self._meant.get(each, path) == path and aliases.get(each, each) == each
            )
            if (name := next(free, None)) is None:
                log.warning("%s is left out: its names are used for other models; rename the file", path)
                continue
            if name not in self._meant and short_name(path) in self._meant:
                log.warning(
                    "%s is served as %r: %r means %s", path, name, short_name(path), self._meant[short_name(path)]
                )
            paths[name] = path
        return paths

    def _remember(self, paths: dict[str, Path]) -> None:
        """Keeps the meaning of every name, also of those without a weight type."""
        shorter = Counter(each for name in paths for each in shorter_names(name))
        for name, path in paths.items():
            self._meant[name] = path
            for each in shorter_names(name):
                if shorter[each] == 1 and each not in paths:
                    self._meant.setdefault(each, path)

    def _beside(self, path: Path, config: EngineConfig) -> Path | None:
        """The projector beside a model in a folder below --models-dir, as in llama-server, unless the settings exclude
        images."""
        root = self._sources.folder
        if root is None or not path.is_relative_to(root) or not self._sources.projectors:
            return None
        if config.mmproj or config.pooling or config.deterministic or not (found := projector_beside(path, root)):
            return None
        from cppbatch.llama.media_encoder import has_mtmd  # loads llama.cpp's library

        return found if has_mtmd() else None

    @staticmethod
    def _name_in(paths: dict[str, Path], name: str) -> str:
        """The model in the folder that a name in the settings file refers to, if any."""
        if name in paths:
            return name
        found = [each for each in paths if name in shorter_names(each)]
        return found[0] if len(found) == 1 else name

    def _path_of(self, name: str, settings: dict[str, Any]) -> Path:
        """The file that a section of the settings file names. Raises `ConfigError`."""
        given = settings.get("model", settings.get("m"))
        file = self._sources.settings_file
        if given is None and (elsewhere := _elsewhere(name, settings)):
            finds = [choose_model] if _MMPROJ_KEYS & settings.keys() else [choose_projector, choose_model]
            if not is_downloaded(elsewhere):
                self._missing[name] = [partial(find, elsewhere) for find in finds]
                return Path(elsewhere)
            self._projectors[name] = choose_projector(elsewhere) if choose_projector in finds else None
            return choose_model(elsewhere)
        if given is None or file is None:
            raise ConfigError(
                f'--models-config {file}: {name!r} not found in --models-dir; set its file: model = "FILE.gguf"'
            )
        places = [file.parent, *([self._sources.folder] if self._sources.folder else [])]
        return next((path for place in places if (path := place / str(given)).is_file()), Path(str(given)))

    def _spec(self, name: str, path: Path, own: ModelSettings) -> ModelSpec:
        from cppbatch.server.models.loader import ModelSpec

        deployment = msgspec.structs.replace(self._deployment, **own.deployment)
        where = f"--models-config, model {name!r}"
        _refuse("in-process", deployment.in_process, where)
        _refuse("rpc", "rpc" in own.engine, where)
        try:
            status = path.stat()
            version = (status.st_mtime_ns, status.st_size)
        except OSError:
            version = None  # loading reports the error
        return ModelSpec(
            name=name,
            config=own.config(self._config, path),
            given=frozenset(self._given | own.engine.keys()),
            deployment=msgspec.structs.replace(deployment, sleep_idle_seconds=-1),
            settings=own.settings(self._settings),
            ttl=deployment.sleep_idle_seconds,
            file_version=version,
        )

    def _default(self, content: ModelFile, names: list[str]) -> str | None:
        if content.default is not None:
            if content.default not in names:
                raise ConfigError(f"--models-config: default is {content.default!r}; it must be one of {names}")
            return content.default
        if self._sources.files:
            return names[0]
        return names[0] if len(names) == 1 else None


def _elsewhere(name: str, settings: Mapping[str, Any]) -> str | None:
    """The model of the hub, of a registry, or at an address, that a section of the settings file names; None: a file
    here."""

    def value(keys: Sequence[str]) -> str | None:
        return next((str(settings[key]) for key in keys if key in settings), None)

    if image := value(_DOCKER_KEYS):
        return f"docker://{image}"
    named = hub_name(value(_HUB_KEYS), value(_HUB_FILE_KEYS)) or value(_URL_KEYS)
    on_hub = hub_model(name)
    return named or (name if on_hub and (on_hub.choice or present_file(on_hub)) else None)


def _names(path: Path, prefix: str) -> list[str]:
    """The names that a file may get, best first: its own; prefixed with `prefix`; prefixed with as many of its folders
    as necessary."""
    name, folders = short_name(path), path.absolute().parts[1:-1]
    prefixes = [prefix, *("/".join(folders[-n:]) for n in range(1, len(folders) + 1))]
    return [name, *(f"{prefix}/{name}" for prefix in prefixes)]


def _aliases_in(content: ModelFile) -> dict[str, str]:
    """The aliases in the sections of a settings file, with their models."""
    from cppbatch.cli.model_settings import parse_settings

    aliases: dict[str, str] = {}
    for name, settings in content.models.items():
        if given := {key: value for key, value in settings.items() if key in _ALIAS_KEYS}:
            parsed = parse_settings(given, f"--models-config, model {name!r}").server["aliases"]
            aliases.update(dict.fromkeys(parsed, name))
    return aliases


def _refuse(flag: str, is_given: bool, where: str = "several models") -> None:
    if is_given:
        raise ConfigError(f"{where}: {flag} applies to a server with a single model; leave it out")


def _take_switch(settings: dict[str, Any], key: str, name: str) -> bool:
    value = settings.pop(key, False)
    if str(value).lower() not in ("true", "false", "1", "0"):
        raise ConfigError(f"--models-config, model {name!r}: {key} is {value!r}; it must be true or false")
    return str(value).lower() in ("true", "1")


def _check_aliases(specs: list[ModelSpec]) -> None:
    names = {spec.name: spec.name for spec in specs}
    for spec in specs:
        for alias in spec.settings.aliases:
            if names.setdefault(alias, spec.name) != spec.name:
                raise ConfigError(
                    f"--models-config: alias {alias!r} is used for both {names[alias]!r} and {spec.name!r}"
                )


def many_models(
    sources: ModelSources, config: EngineConfig, given: set[str], deployment: Deployment, settings: ServerSettings
) -> Callable[[], ManyModels]:
    """A factory for the models of a server, to be called in its event loop. Raises `ConfigError`."""
    from cppbatch.server.models.loader import MemoryPlanLoader
    from cppbatch.server.models.many import ManyModels

    if settings.strict_model and sources.any_model:
        raise ConfigError("--any-model and --strict-model cannot be combined; leave one out")
    if sources.memory_mib and not sources.memory_check:
        raise ConfigError("--models-memory requires memory estimates, which --no-memory-check disables; leave one out")
    catalog = Catalog(sources, config, given, deployment, settings)
    content = catalog.read()  # raises before the server listens
    if sources.any_model and content.default is None:
        raise ConfigError("--any-model requires a default model: -m, or `default` in --models-config")
    loader = MemoryPlanLoader(
        use_profiles=sources.use_profiles,
        memory_check=sources.memory_check,
        budget=sources.memory_mib << 20 if sources.memory_mib else None,
    )
    shared = msgspec.structs.replace(settings, strict_model=False)
    return lambda: ManyModels(
        catalog,
        shared,
        loader,
        max_loaded=sources.max_loaded,
        autoload=sources.autoload,
        any_model=sources.any_model,
        folder=sources.folder,
    )
