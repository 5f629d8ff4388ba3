"""`python -m tests.archs [ARCHITECTURE...] [--page]`, described in docs/models-supported.md."""

from __future__ import annotations

import argparse
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.archs.checks import CHECKS
from tests.archs.page import PAGE, surprises, write_page
from tests.archs.ring import LAYOUTS, Found, make_models, read_results, run, write_results


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.archs", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="ARCHITECTURE", help="such as gemma3; without: all, and the page")
    parser.add_argument("--layout", choices=LAYOUTS, action="append", help="only this one")
    parser.add_argument("--check", choices=CHECKS, action="append", help="only this one; may be given several times")
    parser.add_argument("-j", type=int, default=os.cpu_count() or 1, metavar="N", help="models at once")
    parser.add_argument("--page", action="store_true", help="only write the page, from the last results")
    given = parser.parse_args()
    results, layouts, checks = read_results(), given.layout or LAYOUTS, given.check or tuple(CHECKS)
    if given.page:
        write_page(results)
        print(f"written: {PAGE}")
        return 0

    def check(job: tuple[str, Path]) -> tuple[str, str, Found, float]:
        layout, file = job
        began = time.monotonic()
        return file.stem, layout, run(file, layout, checks), time.monotonic() - began

    n_surprises = 0
    with ThreadPoolExecutor(given.j) as pool:
        for name, layout, found, seconds in pool.map(
            check, [(layout, file) for layout in layouts for file in make_models(given.names)]
        ):
            earlier = results.setdefault(name, {}).setdefault(layout, found)
            earlier.words |= found.words
            earlier.details |= found.details
            earlier.memory = found.memory or earlier.memory
            write_results(results)
            rest = ", ".join(f"{check} {word}" for check, word in found.words.items() if word != "yes")
            print(f"{name:24} {layout:13} {found.memory:26} {seconds:4.0f} s   {rest}", flush=True)
            for line in surprises(name, found):
                print(f"    {line}", flush=True)
                n_surprises += 1
    if not (given.names or given.layout or given.check):
        write_page(results)
        print(f"written: {PAGE}")
    print(f"{n_surprises} surprises")
    return 1 if n_surprises else 0


raise SystemExit(main())
