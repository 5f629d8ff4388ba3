"""Runs the tests of a ring that failed in its last run once more, alone: `python -m tests.run_alone RING [-m MARK]`.

With more than a few failures it only says so: that is not a busy machine.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

MOST = 3
CACHES = Path(__file__).parents[1] / ".pytest_cache"
"""scripts/test gives each ring a folder in it."""


def failed_tests(ring: str) -> list[str]:
    """The ids of the ring's tests that failed when they ran last. A file that fails to import is one."""
    recorded = CACHES / ring / "v/cache/lastfailed"
    return list(json.loads(recorded.read_text())) if recorded.exists() else []


def main(arguments: list[str]) -> int:
    ring, *others = arguments
    failed = failed_tests(ring)
    mark = ["-m", others[others.index("-m") + 1]] if "-m" in others else []
    if not 0 < len(failed) <= MOST:
        print(f"{len(failed)} tests failed; only up to {MOST} are run again")
        return 1
    code = subprocess.run([sys.executable, "-m", "pytest", *mark, *failed], check=False).returncode
    if code == 0:
        print("Failed beside other tests, passed alone:", *failed, sep="\n  ")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
