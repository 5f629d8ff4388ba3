"""`python -m tests.llama_server [FILE...] [-k EXPRESSION]`, described in docs/llama-server.md."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from tests.llama_server import flags, placement
from tests.llama_server.known import (
    KnownFile,
    n_passed_by_cppbatch,
    n_passed_by_llama_server,
    page_tables,
    read_known,
    surprises_of_cppbatch,
    surprises_of_llama_server,
    unknown_names,
)
from tests.llama_server.ring import ROOT, Ring


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.llama_server", description=__doc__)
    parser.add_argument(
        "files", nargs="*", metavar="FILE", help="such as basic or test_basic, placement or flags; without: all known"
    )
    parser.add_argument("--tables", action="store_true", help="only print the tables of docs/llama-server.md")
    parser.add_argument("-k", metavar="EXPRESSION", help="only the tests that pytest chooses by it")
    given = parser.parse_args()
    known = read_known()
    if given.tables:
        print(page_tables(known), end="")
        return 0
    folder, binary = ROOT / "build" / "llama-server-tests", os.environ.get("CPPBATCH_LLAMA_SERVER")
    if given.files == ["flags"]:
        return 0 if flags.run(Path(binary).expanduser() if binary else None) else 1
    if given.files == ["placement"]:
        if not binary:
            parser.error("placement compares with llama-server: set CPPBATCH_LLAMA_SERVER to a build with RPC")
        return 1 if placement.run(folder / "placement", Path(binary).expanduser()) else 0
    ring = Ring(folder)
    names = ["test_" + name.removeprefix("test_") for name in given.files] or list(known)
    if missing := [name for name in names if name not in ring.files()]:
        parser.error(f"llama-server has no tests {', '.join(missing)}, but {', '.join(ring.files())}")
    arguments = ["-k", given.k] if given.k else []
    print(f"{'':30} llama-server   cppbatch", flush=True)
    surprises, n_all, n_same = 0, 0, 0
    for name in names:
        start = time.monotonic()
        of_file = known.get(name, KnownFile())
        found: list[str] = []
        if binary:
            outcomes = ring.run(name, Path(binary).expanduser(), *arguments, failing=of_file.is_not_here)
            found += surprises_of_llama_server(of_file, outcomes)
        outcomes = ring.run(name, ring.cppbatch, *arguments, failing=of_file.fails_on_cppbatch)
        found += surprises_of_cppbatch(of_file, outcomes)
        n_there, n_here = n_passed_by_llama_server(of_file, outcomes), n_passed_by_cppbatch(of_file, outcomes)
        if not given.k:
            found += unknown_names(of_file, outcomes)
            if (n_there, n_here) != (of_file.llama_server, of_file.cppbatch):
                found.append(f"known.toml says {of_file.llama_server} and {of_file.cppbatch}")
        print(f"{name:30} {n_there:12} {n_here:10}   {time.monotonic() - start:.0f} s", flush=True)
        for surprise in found:
            print(f"    {surprise}", flush=True)
        surprises, n_all, n_same = surprises + len(found), n_all + n_there, n_same + n_here
    print(f"{'':30} {n_all:12} {n_same:10}   {n_same / max(n_all, 1):.1%}")
    return 1 if surprises else 0


sys.exit(main())
