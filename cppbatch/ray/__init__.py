"""cppbatch on Ray Serve: replicas on one machine or many. Needs the extra `ray`; importing this does not import Ray."""

from __future__ import annotations

from typing import Any

__all__ = ["app"]


def app(arguments: dict[str, Any]) -> Any:
    """The Serve application of a model, with the HTTP API of `cppbatch serve`: `import_path: cppbatch.ray:app`.

    `arguments`: the `args` of a Serve config file, as in `cppbatch.ray.serve_application.Arguments`. Returns a
    `ray.serve.Application`. Raises `ConfigError` and `ModelError`.
    """
    from cppbatch.ray.serve_application import build

    return build(arguments)
