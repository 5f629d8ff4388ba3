"""Profiles: the best settings that `cppbatch tune` found for a model on this machine, as TOML files."""

from __future__ import annotations

import datetime
import hashlib
import logging
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
from platformdirs import user_config_path

from cppbatch.config import PLACEMENT, EngineConfig, FlashAttention, KvLayout, flag_of
from cppbatch.errors import ConfigError
from cppbatch.models.find import file_identity
from cppbatch.sizing.machine import this_machine
from cppbatch.typed_json import decode_toml

log = logging.getLogger("cppbatch.tune")

VERSION = 1
_CONDITIONS = ("n_gpu_layers", "device", "cache_type_k", "cache_type_v")
# where they are given:
_OTHERS = (*PLACEMENT, "kv_offload", "numa", "kv_overrides", "cpu_mask", "cpu_range")
_PLACEMENT = tuple(name for name in _OTHERS if name not in _CONDITIONS)


class TunedSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The settings of an `EngineConfig` that tuning chooses, with the same types."""

    n_parallel: int
    n_ctx: int
    kv_layout: KvLayout
    flash_attn: FlashAttention
    n_ubatch: int
    n_threads: int
    n_gpu_layers: int = -1
    n_cpu_moe: int = 0
    n_cpu_ffn: int = 0
    override_tensor: tuple[str, ...] = ()
    device_names: tuple[str, ...] = ()
    tensor_split: tuple[float, ...] = ()


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of a profile file."""

    version: int
    made: datetime.datetime
    cppbatch: str
    model: str
    cpu: str
    cores: int
    conditions: dict[str, str]
    """Settings that tuning took as given and that the result depends on."""
    settings: TunedSettings
    measured: dict[str, float]
    """The speeds reached, for information only."""
    step_ms: dict[str, Annotated[float, msgspec.Meta(gt=0)]] = {}
    """Milliseconds of a step by decode rows, with these settings: what the engine knows of its speed at the start."""


def profiles_folder() -> Path:
    """Returns the folder `profiles` in $CPPBATCH_CONFIG, else in the user's configuration folder."""
    named = os.environ.get("CPPBATCH_CONFIG")
    return (Path(named).expanduser() if named else user_config_path("cppbatch")) / "profiles"


def profile_path(config: EngineConfig) -> Path:
    """Returns the file for this model on this machine. A model is identified by its file's size and first MiB."""
    model, machine = Path(config.model_path), this_machine(with_llama=False)
    key = repr((*file_identity(model), machine.cpu, machine.cores, *conditions(config).values()))
    return profiles_folder() / f"{model.stem}-{hashlib.sha256(key.encode()).hexdigest()[:12]}.toml"


def conditions(config: EngineConfig) -> dict[str, str]:
    """Returns the settings that a profile depends on, besides the model and the machine."""
    usual = EngineConfig(config.model_path)
    given = (name for name in _PLACEMENT if getattr(config, name) != getattr(usual, name))
    names = [*_CONDITIONS, *given]
    return {name: str(getattr(config, name)) for name in names}


def save_profile(
    config: EngineConfig, settings: TunedSettings, measured: dict[str, float], step_ms: dict[str, float] | None = None
) -> Path:
    """Writes a profile atomically, in place of an older one. Raises `ConfigError` if it cannot be written."""
    path, machine = profile_path(config), this_machine(with_llama=False)
    profile = Profile(
        version=VERSION,
        made=datetime.datetime.now(datetime.timezone.utc).replace(microsecond=0),
        cppbatch=machine.cppbatch,
        model=Path(config.model_path).name,
        cpu=machine.cpu,
        cores=machine.cores,
        conditions=conditions(config),
        settings=settings,
        measured=measured,
        step_ms=step_ms or {},
    )
    part = path.with_suffix(".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(msgspec.toml.encode(profile))
        part.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write the profile to {path}: {error.strerror}. Set CPPBATCH_CONFIG") from error
    return path


class Used(NamedTuple):
    """Settings with those of a profile."""

    config: EngineConfig
    line: str | None = None
    """What changed; None: nothing."""
    decided: frozenset[str] = frozenset()
    """The settings determined by the profile, even if unchanged. Empty: no usable profile."""


def use_profile(config: EngineConfig, given: Collection[str]) -> Used:
    """Returns `config` with its profile's settings, except those in `given`.

    An unreadable or outdated profile is ignored with a warning.
    """
    path = profile_path(config)
    if config.pooling or not os.path.isfile(path):  # unlike Path.is_file: false also where it may not be asked
        return Used(config)
    try:
        profile = decode_toml(path.read_bytes(), Profile)
        if profile.version != VERSION:
            raise ConfigError(f"it has version {profile.version}, but this cppbatch requires {VERSION}")
        decided = frozenset(TunedSettings.__struct_fields__) - _user_settings(given)
        found = msgspec.structs.asdict(profile.settings)
        changes = {name: found[name] for name in found if name in decided and found[name] != getattr(config, name)}
        changed = msgspec.structs.replace(config, **changes)
        if all(getattr(changed, name) == tuned for name, tuned in found.items()):
            step_ms = tuple((int(rows), ms) for rows, ms in profile.step_ms.items())
            changed = msgspec.structs.replace(changed, step_ms=step_ms)
    except (OSError, ValueError, msgspec.DecodeError, ConfigError) as error:
        log.warning("the profile %s is not used: %s. Create a new one with `cppbatch tune`, or delete it", path, error)
        return Used(config)
    if not changes:
        return Used(changed, None, decided)
    line = f"using the profile {path} of {profile.made.date()}: {as_flags(changes)}; use --no-profile to ignore it"
    return Used(changed, line, decided)


def as_flags(settings: Mapping[str, object]) -> str:
    """Returns settings as command-line flags."""
    texts = {name: ",".join(map(str, v)) if isinstance(v, tuple) else v for name, v in settings.items()}
    return " ".join(f"{flag_of(name)} {text}" for name, text in texts.items() if text != "")


def _user_settings(given: Collection[str]) -> frozenset[str]:
    """The settings set by the user. -np and -c belong together: giving one of them sets both."""
    sizes = {"n_parallel", "n_ctx"}
    return frozenset(given) | (sizes if sizes & set(given) else set())
