"""A program that compiles and renders one chat template, where it may hang, crash and need much memory.

Writes `{}` when it is ready. In: a line of JSON, the template's text; its answer is `{}` or an error. Then a line of
JSON for each rendering: its variables. Out: a line of JSON: `{"text": n}`, followed by n bytes of UTF-8, or `{"error":
message, "kind": ...}`, or `{"call": [name, arguments]}` for one of the reader's functions, which answers with a line
`{"text": ...}` or `{"error": ...}`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

import jinja2

from cppbatch.chat.sandbox import GivenList, HostFunction, Sandbox, make_sandbox, render_template

_MAX_MEMORY = 1 << 30
"""Bytes of the address space, on Linux."""
_LENIENT = (TypeError, jinja2.UndefinedError, RecursionError)


def main() -> None:
    """Answers until stdin ends."""
    if hasattr(os, "nice"):  # not on Windows
        os.nice(5)
    _limit_memory()
    template = None
    _answer({})
    for line in sys.stdin.buffer:
        _set_alarm(10)  # the reader kills this process earlier
        try:
            given = json.loads(line)
            if template is None:
                template = make_sandbox(Sandbox).from_string(given)
                _answer({})
            else:
                text = render_template(template, _variables(**given)).encode("utf-8", "surrogatepass")
                _answer({"text": len(text)}, text)
        except MemoryError:
            _answer({"error": f"needs more than {_MAX_MEMORY >> 20} MiB of memory", "kind": "stopped"})
            return
        except Exception as error:  # a template is a program and may raise anything
            kind = "lenient" if isinstance(error, _LENIENT) else "refused"
            _answer({"error": f"{error!s:.1000}", "kind": kind})
        _set_alarm(0)


def _variables(variables: dict[str, Any], functions: list[str]) -> dict[str, Any]:
    lists = {name: GivenList(variables[name]) for name in ("messages", "tools") if variables.get(name)}
    return variables | lists | {name: HostFunction(lambda *args, name=name: _call(name, args)) for name in functions}


def _call(name: str, args: tuple[Any, ...]) -> str:
    _answer({"call": [name, args]})
    answer = json.loads(sys.stdin.buffer.readline())
    if "error" in answer:
        raise jinja2.TemplateError(answer["error"])
    text: str = answer["text"]
    return text


def _answer(header: dict[str, Any], body: bytes = b"") -> None:
    sys.stdout.buffer.write(json.dumps(header).encode() + b"\n" + body)
    sys.stdout.buffer.flush()


def _set_alarm(seconds: int) -> None:
    """Ends this process after this time, in case its parent died and cannot kill it; 0 cancels."""
    if hasattr(signal, "alarm"):  # not on Windows
        signal.alarm(seconds)


def _limit_memory() -> None:
    if sys.platform == "linux":  # macOS accepts the limit and ignores it
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY, _MAX_MEMORY))


if __name__ == "__main__":
    main()
