"""The child process that writes a model again: llama.cpp's quantiser cannot be interrupted, and may abort."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from cppbatch.errors import CppBatchError
from cppbatch.llama.quantize import quantize
from cppbatch.models.requantize import Job


def main() -> None:
    """Reads a `Job` from stdin. Exit code 1 with one line on stderr if it fails."""
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=Job)
    try:
        quantize(Path(job.source), Path(job.target), job.default, job.overrides)
    except CppBatchError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
