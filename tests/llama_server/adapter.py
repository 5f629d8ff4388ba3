"""Starts `cppbatch serve` with the flags that llama-server's tests give to llama-server, in place of this process.

It imports nothing of the project, since it runs at least once in each test.
"""

from __future__ import annotations

import os
import sys

LEFT_OUT = {
    "--ui-mcp-proxy",
}
"""Flags without a value that cppbatch does not have."""

LEFT_OUT_WITH_VALUE = {
    "--spec-synth-len",
    "--spec-synth-rates",
    "--models-preset",  # models of a hub
    "--models-dir",
    "--mmproj-url",
    "--media-path",
    "--tools",
    "--mcp-servers-config",
    "--mcp-servers-json",
}
"""Flags with a value that cppbatch does not have."""


def cppbatch_flags(flags: list[str]) -> list[str]:
    """llama-server's flags as cppbatch takes them."""
    translated: list[str] = []
    rest = iter(flags)
    for flag in rest:
        if flag in LEFT_OUT_WITH_VALUE:
            next(rest)
        elif flag not in LEFT_OUT:
            translated.append(flag)
    if "--kv-unified" not in flags:
        translated += ["--kv-layout", "per-sequence"]  # llama-server divides -c by -np then, as the tests expect
    if "--metrics" not in flags:
        translated += ["--no-metrics"]  # llama-server's default
    if "--model" not in flags:  # a router's tests
        translated += ["--models-config", router_settings()]
    return [*translated, "--no-profile", "--drain-timeout", "1"]


ROUTER_MODELS = {
    "ggml-org/tinygemma3-GGUF:Q8_0": "stories15M_MOE-F16.gguf",
    "ggml-org/test-model-stories260K:F32": "test-model-stories260K.gguf",
    "ggml-org/test-model-stories260K-infill:F32": "test-model-stories260K-infill.gguf",
}
"""The models that the router's tests name, and their replacements."""


def router_settings() -> str:
    """A settings file with `ROUTER_MODELS`. Returns its path."""
    path = os.path.join(os.environ["RING_MODELS"], f"router-{os.getpid()}.toml")
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(f'[models."{name}"]\nmodel = "{model}"\n' for name, model in ROUTER_MODELS.items())
    return path


if __name__ == "__main__":
    os.execv(sys.executable, [sys.executable, "-m", "cppbatch", "serve", *cppbatch_flags(sys.argv[1:])])
