"""cppbatch on Ray Serve: replicas on one or more machines. Requires the extra `ray`. Does not import Ray by itself."""

from __future__ import annotations

import os
from typing import Any

__all__ = ["app"]

# Ray reads these when it is imported.
os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")  # else Serve's last calls would restart a stopped Ray
os.environ.setdefault("RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP", "0")  # avoids a thread switch per call
# For a cluster started by this process:
os.environ.setdefault("RAY_worker_niceness", "0")  # with Ray's default, 15, other programs take CPU time from replicas
os.environ.setdefault("RAY_SERVE_CONTROL_LOOP_INTERVAL_S", "0.5")  # 0.1 takes 2% of a core


def app(arguments: dict[str, Any]) -> Any:
    """The Serve application of a model, with the HTTP API of `cppbatch serve`: `import_path: cppbatch.ray:app`.

    `arguments`: the `args` of a Serve config file (`cppbatch.ray.serve_application.Arguments`). Returns a
    `ray.serve.Application`. Raises `ConfigError` and `ModelError`.
    """
    from cppbatch.ray.serve_application import build

    return build(arguments)
