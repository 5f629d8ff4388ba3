"""PDF and zip files in request bodies, read on threads of their own: a PDF may take a minute (`pdf_text`)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from cppbatch.engine.media.sources import from_base64
from cppbatch.errors import ConfigError, InvalidRequest, UnreadableFile
from cppbatch.pdf_text import pdf_text

Result = TypeVar("Result")

_THREADS = ThreadPoolExecutor(2, "cppbatch-documents")
"""So few that their child processes leave memory for the models."""


async def on_document_thread(function: Callable[..., Result], *arguments: Any) -> Result:
    """Calls a function that reads documents."""
    return await asyncio.get_running_loop().run_in_executor(_THREADS, function, *arguments)


async def pdf_in_base64(field: str, data: str) -> str:
    """The text of a PDF in base64. Raises `InvalidRequest`, also if pypdf is not installed."""

    def read() -> str:
        return pdf_text(from_base64(field, data))

    try:
        return await on_document_thread(read)
    except (UnreadableFile, ConfigError) as error:
        raise InvalidRequest(field, str(error)) from None
