"""The models that a server has loaded, for `cppbatch models ps`."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from datetime import datetime, timezone
from typing import Any

from cppbatch.cli.output import format_bytes
from cppbatch.errors import CppBatchError


def loaded_models(url: str, api_key: str | None) -> list[tuple[str, ...]]:
    """Name, size, type, context length and the time of unloading, of each model that the server at `url` has loaded.

    Raises `CppBatchError` if it does not answer.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    request = urllib.request.Request(f"{url.rstrip('/')}/api/ps", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            models: list[dict[str, Any]] = json.load(answer)["models"]
    except urllib.error.HTTPError as error:
        raise CppBatchError(
            f"{url} answers with status {error.code}: {error.read().decode(errors='replace')}"
        ) from error
    except (OSError, ValueError, KeyError) as error:
        raise CppBatchError(f"{url} does not answer: {error}. Start `cppbatch serve`, or give its --url") from error
    return [_row(model) for model in models]


def _row(model: dict[str, Any]) -> tuple[str, ...]:
    until = datetime.fromisoformat(model["expires_at"].replace("Z", "+00:00"))
    is_kept = (until - datetime.now(timezone.utc)).days > 36_500  # servers name a time centuries from now
    size, kind = format_bytes(model["size"]), model["details"]["quantization_level"]
    when = "never" if is_kept else until.astimezone().strftime("%Y-%m-%d %H:%M:%S")
    return model["name"], size, kind, f"{model['context_length']:,}", when
