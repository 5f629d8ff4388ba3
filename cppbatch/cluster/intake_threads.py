"""Threads on which requests are prepared, beside the one that steps."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from cppbatch.engine.params import SamplingParams

N_THREADS = 2
"""For tokenising, and as many for grammars, so that a slow one holds up nobody else's text."""


class IntakeThreads:
    """Tokenising a long text takes a while, compiling a grammar longer."""

    def __init__(self) -> None:
        self._texts = ThreadPoolExecutor(N_THREADS, thread_name_prefix="cppbatch-intake")
        self._grammars = ThreadPoolExecutor(N_THREADS, thread_name_prefix="cppbatch-grammars")

    def of(self, params: SamplingParams) -> ThreadPoolExecutor:
        """Those that prepare such a request."""
        return self._grammars if params.is_constrained else self._texts

    def close(self) -> None:
        """Waits for what is being prepared and drops the rest."""
        for threads in (self._texts, self._grammars):
            threads.shutdown(cancel_futures=True)
