"""Models that clients have created: another name for a model, with a system message and sampling defaults of its own.

They are the settings of a model, not files: their requests run in the engine of the model they are made from. The
folder of models has them in `created-models.json`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from threading import Lock
from typing import Any

import msgspec

from cppbatch.errors import ConfigError, StorageError
from cppbatch.regular_files import open_regular, replace_file
from cppbatch.server.settings import ServerSettings

log = logging.getLogger("cppbatch.models")

FILE_NAME = "created-models.json"
_MAX_MODELS = 1000


class CreatedModel(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A created model."""

    base: str
    """The name of the model in the folder that it is made from."""
    system: str | None = None
    """The system message of conversations without one."""
    sampling: dict[str, Any] = {}
    """Fields of `SamplingParams` for requests that do not set them."""

    def settings(self, base: ServerSettings) -> ServerSettings:
        """The settings of its requests. Raises `ConfigError` for invalid sampling defaults."""
        sampling = base.sampling_defaults | self.sampling
        system = base.system if self.system is None else self.system
        return msgspec.structs.replace(base, aliases=(), tags=(), sampling_defaults=sampling, system=system)


class CreatedModels:
    """The created models of a folder, by name."""

    def __init__(self, folder: Path) -> None:
        """A file that cannot be read is a warning in the log, and is not overwritten: then nothing can be created."""
        self.folder = folder
        self._path = folder / FILE_NAME
        self._models: dict[str, CreatedModel] = {}
        self._changing = Lock()  # requests change it on threads of their own
        self._fault: str | None = None
        if not os.path.lexists(self._path):
            return
        try:
            with open_regular(self._path) as file:
                self._models = msgspec.json.decode(file.read(64 << 20), type=dict[str, CreatedModel])
        except (OSError, ValueError, msgspec.DecodeError) as error:
            self._fault = str(error)
            log.warning("%s cannot be read, so its models are not served: %s", self._path, error)

    def __iter__(self) -> Iterator[str]:
        return iter(self._models)

    def find(self, name: str) -> CreatedModel | None:
        """The model with this name."""
        return self._models.get(name)

    def add(self, name: str, model: CreatedModel) -> None:
        """Adds or replaces a model. Raises as `remove`."""
        with self._changing:
            if name not in self._models and len(self._models) >= _MAX_MODELS:
                raise ConfigError(f"{self._path} has {_MAX_MODELS} models, the most; delete some of them")
            self._write({**self._models, name: model})

    def remove(self, name: str) -> None:
        """Removes a model. Raises `ConfigError` if the file was not readable, and `StorageError` if it cannot be
        written."""
        with self._changing:
            self._write({each: model for each, model in self._models.items() if each != name})

    def _write(self, models: dict[str, CreatedModel]) -> None:
        if self._fault:
            raise ConfigError(f"{FILE_NAME} in the models folder cannot be read: repair or remove it")
        part = self._path.with_name(f".{FILE_NAME}.{os.getpid()}.part")
        try:
            part.write_bytes(msgspec.json.format(msgspec.json.encode(models)))
            replace_file(part, self._path)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise StorageError(f"{self._path} cannot be written: {error.strerror or error}") from error
        self._models = models
