"""Threads on which requests are prepared, beside the one that steps."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from cppbatch.engine.engine import BatchInferenceEngine
from cppbatch.engine.request import GenerationRequest, is_long


class IntakeThreads:
    """Tokenising a long text takes a while, compiling a grammar longer: neither holds up anybody else's short text."""

    def __init__(self) -> None:
        self._quick = ThreadPoolExecutor(2, thread_name_prefix="cppbatch-intake")
        self._long_texts = ThreadPoolExecutor(1, thread_name_prefix="cppbatch-long-intake")
        self._grammars = ThreadPoolExecutor(2, thread_name_prefix="cppbatch-grammars")

    def for_request(self, engine: BatchInferenceEngine, request: GenerationRequest) -> ThreadPoolExecutor:
        """The threads that prepare this request."""
        if engine.is_quick(request):
            return self._quick
        return self._long_texts if is_long(request.prompt) else self._grammars

    def for_text(self, text: str | list[int]) -> ThreadPoolExecutor:
        """The threads that tokenise this text."""
        return self._long_texts if is_long(text) else self._quick

    def close(self) -> None:
        """Waits for what is being prepared and drops the rest."""
        for threads in (self._quick, self._long_texts, self._grammars):
            threads.shutdown(cancel_futures=True)
