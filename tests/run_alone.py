"""Runs the tests that failed in the last run of pytest once more, one at a time: `python -m tests.run_alone ARGUMENTS`.

The arguments are those of that run. With more than a few failures it only says so: that is not a busy machine.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

MOST = 3
LAST_FAILED = Path(__file__).parents[1] / ".pytest_cache/v/cache/lastfailed"


def failed_tests(folders: list[str]) -> list[str]:
    """The ids of the tests in these folders that failed when they ran last. A file that fails to import is one."""
    failed = json.loads(LAST_FAILED.read_text()) if LAST_FAILED.exists() else {}
    return [test for test in failed if any(test.startswith(f"{folder}/") for folder in folders)]


def main(arguments: list[str]) -> int:
    failed = failed_tests([argument.rstrip("/") for argument in arguments if argument.startswith("tests/")])
    if not 0 < len(failed) <= MOST:
        print(f"{len(failed)} tests failed; only up to {MOST} are run again")
        return 1
    code = subprocess.run([sys.executable, "-m", "pytest", *failed], check=False).returncode
    if code == 0:
        print("Failed beside other tests, passed alone:", *failed, sep="\n  ")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
