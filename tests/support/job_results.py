"""Items and results of a job, and the contents of its output files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from cppbatch.jobs.job_request import JobRequest, JobResponse, hash64
from cppbatch.jobs.journal import Journal, ResultLine, response_line
from cppbatch.jobs.ledger import Ledger


def item(line: int, custom_id: str | None = None, prompt: str = "say") -> JobRequest:
    custom_id = custom_id or f"id-{line}"
    return JobRequest(
        line=line,
        custom_id=custom_id,
        url="/v1/completions",
        body={"prompt": prompt},
        content_hash=hash64(f"{custom_id} {prompt}".encode()),
    )


def result(one: JobRequest, *, status: int = 200) -> ResultLine:
    return response_line(one, JobResponse(status=status, body={"said": one.line}, prompt_tokens=2, completion_tokens=3))


def opened(folder: Path, *, ordered: bool = False) -> Journal:
    return Journal(Ledger(folder / "job"), folder / "out.jsonl", folder / "errors.jsonl", ordered=ordered)


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [msgspec.json.decode(line) for line in path.read_bytes().splitlines()] if path.exists() else []


def ids_of(path: Path) -> list[str]:
    return [line["custom_id"] for line in lines_of(path)]
