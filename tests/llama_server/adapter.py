"""Starts `cppbatch serve` with the flags that llama-server's tests give to llama-server, in place of this process.

It imports nothing of the project, since it runs at least once in each test.
"""

from __future__ import annotations

import os
import sys

LEFT_OUT = {
    "--no-models-autoload",  # there is no router
    "--ui-mcp-proxy",
}
"""Flags without a value that cppbatch does not have."""

LEFT_OUT_WITH_VALUE = {
    "--reasoning-format",
    "--spec-synth-len",
    "--spec-synth-rates",
    "--models-max",
    "--models-preset",
    "--models-dir",
    "--mmproj-url",
    "--media-path",
    "--tools",
    "--tools-runtime",
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
    if "--model" not in flags:  # a router's tests, some of which ask for nothing that needs one
        translated += ["--model", os.path.join(os.environ["RING_MODELS"], "test-model-stories260K.gguf")]
    return [*translated, "--no-profile", "--drain-timeout", "1"]


if __name__ == "__main__":
    os.execv(sys.executable, [sys.executable, "-m", "cppbatch", "serve", *cppbatch_flags(sys.argv[1:])])
