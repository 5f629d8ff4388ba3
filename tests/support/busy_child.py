"""A child that computes without ever releasing the GIL: `busy_child SECONDS`. It prints its blocked signals first."""

from __future__ import annotations

import re
import signal

if __name__ == "__main__":
    print(*sorted(signal.Signals(each).name for each in signal.pthread_sigmask(signal.SIG_BLOCK, [])), flush=True)
    re.match(r"(a*)*b", "a" * 60)
