"""`python -m tests.templates [NAME...]`: the chat templates that llama.cpp ships, read and rendered.

Without options: what a template renders itself is read back, and the conversations of agents are rendered. The other
checks compare with llama.cpp, and sample calls.
"""

from __future__ import annotations

import argparse
import os
import shutil
from collections import Counter
from pathlib import Path

from tests.templates.conversations import write_all
from tests.templates.grammar import sample_calls
from tests.templates.oracle import compare, compare_prompts
from tests.templates.round_trip import check


def templates(names: list[str]) -> list[Path]:
    """The templates in the folder CPPBATCH_TEMPLATES, or those with a name that contains one of these parts."""
    folder = Path(os.environ.get("CPPBATCH_TEMPLATES", ""))
    files = sorted(folder.glob("*.jinja"))
    if not files:
        raise SystemExit(
            f"CPPBATCH_TEMPLATES={folder} has no *.jinja: name the folder models/templates of llama.cpp's sources"
        )
    return [file for file in files if not names or any(name in file.stem for name in names)]


def oracle() -> Path:
    """The program `chat-oracle`."""
    found = os.environ.get("CPPBATCH_CHAT_ORACLE") or shutil.which("chat-oracle")
    if not found:
        raise SystemExit("chat-oracle was not found: set CPPBATCH_CHAT_ORACLE to its path")
    return Path(found)


def read_back(files: list[Path]) -> bool:
    counts = [0, 0]
    for file in files:
        for name, fault in check(file.read_text("utf-8")):
            counts[0] += fault == ""
            counts[1] += fault is not None
            if fault:
                print(f"{file.stem}: {name}: {fault}")
    print(f"{counts[0]} of {counts[1]} messages are read as the templates write them")
    return counts[0] >= 0.96 * counts[1]


def read_as_llama_cpp(files: list[Path], n: int) -> bool:
    total: Counter[str] = Counter()
    for name, found, faults in compare(oracle(), files, n):
        total += found
        if found["ours"] or found["theirs"] or found["none"]:
            print(f"{name}: {', '.join(f'{key} {value}' for key, value in sorted(found.items()))}", flush=True)
        for text in faults[:3]:
            print(f"    only llama.cpp reads {text!r:.300}")
    print(f"all: {', '.join(f'{key} {value}' for key, value in sorted(total.items()))}")
    return not total["theirs"]


def render_as_llama_cpp(files: list[Path]) -> bool:
    faults = {name: fault for name, fault in compare_prompts(oracle(), files) if fault}
    for name, fault in faults.items():
        print(f"{name}: {fault}")
    print(f"{len(files) - len(faults)} of {len(files)} templates render the same prompts as in llama.cpp")
    return len(faults) <= 0.05 * len(files)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.templates", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="a part of a file's name")
    parser.add_argument("--oracle", type=int, metavar="N", help="N random messages of each, also read by llama.cpp")
    parser.add_argument("--prompts", action="store_true", help="prompts, also rendered by llama.cpp")
    parser.add_argument("--grammar", type=int, metavar="N", help="N random texts of each that its grammar lets through")
    given = parser.parse_args()
    files = templates(given.names)
    if given.oracle:
        return 0 if read_as_llama_cpp(files, given.oracle) else 1
    if given.prompts:
        return 0 if render_as_llama_cpp(files) else 1
    if given.grammar:
        return 0 if sample_calls(files, given.grammar) else 1
    passed = [read_back(files), write_all(files)]
    return 0 if all(passed) else 1


raise SystemExit(main())
