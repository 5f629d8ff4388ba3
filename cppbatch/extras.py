"""Optional packages: the extras of pyproject.toml."""

from __future__ import annotations

import importlib

from cppbatch.errors import ConfigError

_PACKAGES = {
    "PIL": ("pillow", "media"),
    "huggingface_hub": ("huggingface-hub", "hub"),
    "matplotlib": ("matplotlib", "plot"),
    "prompt_toolkit": ("prompt-toolkit", "chat"),
    "pyarrow": ("pyarrow", "parquet"),
    "pypdf": ("pypdf", "pdf"),
    "soundfile": ("soundfile", "media"),
    "soxr": ("soxr", "media"),
}
"""The package and the extra of each module."""


def require(module: str, what: str) -> None:
    """Imports the module of an extra: require("pyarrow", "a Parquet file").

    Raises `ConfigError` with the install command if it is missing.
    """
    try:
        importlib.import_module(module)
    except ImportError as error:
        package, extra = _PACKAGES[module]
        raise ConfigError(f'{what} requires {package}: pip install "cppbatch[{extra}]"') from error
