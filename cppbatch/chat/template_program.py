"""A chat template as a program that comes with a file: it is compiled and rendered within limits of time and memory.

Usual templates are in a subset that renders in this process, where each operation is charged before it runs
(`metered_sandbox.py`). All others, and renderings that use up their budget, run in a child process that can be killed.
A template that was stopped is refused at once for a while, so that it takes no time of others.
"""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from time import monotonic
from typing import IO, Any, NamedTuple

import jinja2

from cppbatch.chat.metered_sandbox import compile_metered, render_metered
from cppbatch.chat.render_budget import NotQuick
from cppbatch.chat.sandbox import HostFunction
from cppbatch.child_processes import child_command, start
from cppbatch.errors import ConfigError, InvalidRequest

MAX_SOURCE = 1_000_000
"""Characters of a template. The largest that llama.cpp ships has 17,000."""
_START_S, _IDLE_S = 10.0, 30.0


class Limits(NamedTuple):
    """Seconds."""

    compiling: float = 1.0
    rendering: float = 3.0
    """20 messages take less than 0.01 s."""
    slow: float = 1.0
    """A template that needs longer is refused afterwards, except for a large conversation."""
    pause: float = 10.0
    """How long a template is refused after it was stopped. Doubles each time, up to `longest_pause`."""
    longest_pause: float = 600.0


class TemplateStopped(InvalidRequest):
    """The template took too much time or memory, now or a short time ago."""

    def __init__(self, message: str) -> None:
        super().__init__("messages", f"cannot be rendered: the chat template {message}")


class NeedsChild(Exception):
    """The template renders in a child process, for which this thread must not wait (`quick_only`)."""


_QUICK_ONLY: ContextVar[bool] = ContextVar("_QUICK_ONLY", default=False)


@contextmanager
def quick_only() -> Iterator[None]:
    """A context in which renderings that need the child process raise `NeedsChild`."""
    token = _QUICK_ONLY.set(True)
    try:
        yield
    finally:
        _QUICK_ONLY.reset(token)


@lru_cache(64)
def program_of(source: str) -> TemplateProgram:
    """The template with this text. It is compiled once, and stays known as broken or slow."""
    return TemplateProgram(source)


class TemplateProgram:
    """A compiled template. Thread-safe."""

    def __init__(self, source: str, limits: Limits | None = None) -> None:
        limits = limits or Limits()
        self._template: jinja2.Template | None = None
        self._broken: str | None = None  # why it cannot be compiled; "": it can
        self._child = _Child(source, limits)
        if len(source) > MAX_SOURCE:
            self._broken = f"it has {len(source):,} characters; the limit is {MAX_SOURCE:,}"
            return
        try:
            self._template, self._broken = compile_metered(source), ""
        except jinja2.TemplateSyntaxError as error:
            self._broken = str(error)
        except Exception:  # not in the subset, or Python refuses to compile what Jinja accepts: the child says why
            pass

    @property
    def is_quick(self) -> bool:
        """Whether it renders in this process."""
        return self._template is not None

    def check(self) -> None:
        """Raises `ConfigError` if the text is not a Jinja template, `TemplateStopped` if compiling takes too long."""
        if self._broken is None:
            self._broken = self._child.compile()
        if self._broken:
            raise ConfigError(f"the chat template failed: {self._broken:.1000}")

    def render(self, variables: dict[str, Any], *, seconds: float | None = None) -> str:
        """Returns the text that the template writes. It may raise anything; `TemplateStopped` if it takes more than
        `seconds` (None: the limit) or too much memory."""
        is_large = False
        if self._template is not None:
            try:
                return render_metered(self._template, variables)
            except NotQuick as error:
                is_large = error.is_large
                if not is_large:
                    self._template = None
        if _QUICK_ONLY.get():
            raise NeedsChild
        return self._child.render(variables, seconds, is_large=is_large)

    @property
    def child_seconds(self) -> float:
        """How long all renderings in the child process took."""
        return self._child.seconds

    def stop(self, reason: str) -> TemplateStopped:
        """Refuses the template for a while."""
        return self._child.stop(reason, is_large=False)


class _Refusal:
    """Renderings are refused until then."""

    reason = ""
    until = pause = 0.0


class _Child:
    """The process that renders a template, one conversation at a time. It starts with the first and ends when idle."""

    def __init__(self, source: str, limits: Limits) -> None:
        self._source, self._limits = source, limits
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._used = 0.0
        self.seconds = 0.0
        self._refusals = (_Refusal(), _Refusal())  # of usual and of large conversations, which may be to blame

    def compile(self) -> str:
        """Why the template cannot be compiled; "": it can. Raises `TemplateStopped`."""
        with self._lock:
            self._check_refusal(is_large=False)
            return self._start(is_large=False)

    def render(self, variables: dict[str, Any], seconds: float | None, *, is_large: bool) -> str:
        """Renders in the child process."""
        limit = self._limits.rendering if seconds is None else seconds
        functions = {name: value for name, value in variables.items() if isinstance(value, HostFunction)}
        plain = {name: value for name, value in variables.items() if name not in functions}
        line = json.dumps({"variables": plain, "functions": list(functions)}).encode()
        with self._lock:
            self._check_refusal(is_large=is_large)
            if broken := self._start(is_large=is_large):
                raise jinja2.TemplateError(broken)
            began = monotonic()
            answer, text = self._ask(line, functions, limit, is_large=is_large)
            took = monotonic() - began
            self.seconds += took
            if not is_large and took > self._limits.slow:
                self.stop(f"takes longer than {self._limits.slow:g} s", is_large=False)
        if "error" not in answer:
            return text
        if answer["kind"] == "lenient":
            raise TypeError(answer["error"])
        raise jinja2.TemplateError(answer["error"])

    def stop(self, reason: str, *, is_large: bool) -> TemplateStopped:
        """Refuses renderings for a while. Returns the error."""
        refusal, now = self._refusals[is_large], monotonic()
        forgotten = now > refusal.until + self._limits.longest_pause
        refusal.pause = self._limits.pause if forgotten else min(2 * refusal.pause, self._limits.longest_pause)
        refusal.reason, refusal.until = reason, now + refusal.pause
        return self._refused(refusal)

    def _check_refusal(self, *, is_large: bool) -> None:
        if monotonic() < (refusal := self._refusals[is_large]).until:
            raise self._refused(refusal)

    @staticmethod
    def _refused(refusal: _Refusal) -> TemplateStopped:
        left = max(1, round(refusal.until - monotonic()))
        return TemplateStopped(f"{refusal.reason}; it is tried again in {left} s")

    def _start(self, *, is_large: bool) -> str:
        """Starts the process unless it runs. Returns why the template cannot be compiled; "": it can."""
        if self._process and self._process.poll() is None:
            return ""
        self._end()
        self._process = start(
            child_command("cppbatch.chat.template_child"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._ask(b"", {}, _START_S, is_large=is_large)
        answer, _ = self._ask(json.dumps(self._source).encode(), {}, self._limits.compiling, is_large=is_large)
        if "error" in answer:
            self._end()
            return str(answer["error"])
        self._used = monotonic()
        self._end_when_idle(_IDLE_S)
        return ""

    def _ask(
        self, line: bytes, functions: dict[str, HostFunction], seconds: float, *, is_large: bool
    ) -> tuple[dict[str, Any], str]:
        """The child's answer to a line, and its text. Raises `TemplateStopped`, after which the child has ended."""
        process = self._process
        assert process
        assert process.stdin
        assert process.stdout
        timer = threading.Timer(seconds, process.kill)
        timer.daemon = True
        began = monotonic()
        timer.start()
        try:
            answer, text = _exchange(process.stdin, process.stdout, line, functions)
        except (OSError, EOFError):
            self._end()
            if monotonic() - began >= seconds:
                raise self.stop(f"takes longer than {seconds:.2g} s", is_large=is_large) from None
            raise self.stop("ended its process, possibly because it needs too much memory", is_large=is_large) from None
        except BaseException:  # Ctrl-C: its answer would be mistaken for that to the next line
            self._end()
            raise
        finally:
            timer.cancel()
        if answer.get("kind") == "stopped":
            self._end()
            raise self.stop(answer["error"], is_large=is_large)
        self._used = monotonic()
        return answer, text

    def _end_when_idle(self, seconds: float) -> None:
        timer = threading.Timer(seconds, self._end_if_idle, (self._process,))
        timer.daemon = True
        timer.start()

    def _end_if_idle(self, process: subprocess.Popen[bytes]) -> None:
        with self._lock:
            if process is not self._process:
                return
            if (left := self._used + _IDLE_S - monotonic()) > 0:
                self._end_when_idle(left)
            else:
                self._end()

    def _end(self) -> None:
        if self._process:
            with self._process as process:
                process.kill()
            self._process = None


def _exchange(
    stdin: IO[bytes], stdout: IO[bytes], line: bytes, functions: dict[str, HostFunction]
) -> tuple[dict[str, Any], str]:
    """Writes a line, and returns the answer with its text. Raises OSError or EOFError if the process ends."""
    for _ in range(100):  # the next call starts another child, so that memory does not grow
        if line:
            stdin.write(line + b"\n")
            stdin.flush()
        header = stdout.readline(8 << 20)
        if not header.endswith(b"\n"):
            raise EOFError
        answer: dict[str, Any] = json.loads(header)
        if "call" not in answer:
            body = stdout.read(answer.get("text", 0))
            if len(body) < answer.get("text", 0):
                raise EOFError
            return answer, body.decode("utf-8", "surrogatepass")
        name, arguments = answer["call"]
        try:
            reply = {"text": functions[name](*arguments)}
        except Exception as error:  # the arguments are the template's
            reply = {"error": f"{error!s:.1000}"}
        line = json.dumps(reply).encode()
    raise EOFError
