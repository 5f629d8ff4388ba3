"""Threads on which requests are prepared, beside the one that steps."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from cppbatch.engine.params import SamplingParams
from cppbatch.engine.request import Prompt, is_long


class IntakeThreads:
    """Tokenising a long text takes a while, compiling a grammar longer: neither holds up anybody else's short text."""

    def __init__(self) -> None:
        self._texts = ThreadPoolExecutor(2, thread_name_prefix="cppbatch-intake")
        self._long_texts = ThreadPoolExecutor(1, thread_name_prefix="cppbatch-long-intake")
        self._grammars = ThreadPoolExecutor(2, thread_name_prefix="cppbatch-grammars")

    def of(self, prompt: Prompt, params: SamplingParams | None = None) -> ThreadPoolExecutor:
        """The threads that prepare such a request."""
        if is_long(prompt):
            return self._long_texts
        return self._grammars if params and params.is_constrained else self._texts

    def close(self) -> None:
        """Waits for what is being prepared and drops the rest."""
        for threads in (self._texts, self._long_texts, self._grammars):
            threads.shutdown(cancel_futures=True)
