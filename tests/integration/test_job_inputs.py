"""Reading a job's input takes constant memory, measured in child processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

MOST_MEMORY = """
import sys, threading, time
import psutil
import pyarrow.parquet
from cppbatch.jobs.input.format import detect_input_format
from cppbatch.jobs.input.reader import InputReader

taken, is_done = [], threading.Event()
def watch():
    while not is_done.wait(0.003):
        taken.append(psutil.Process().memory_info().rss)
before = psutil.Process().memory_info().rss
watching = threading.Thread(target=watch)
watching.start()
n = sum(1 for _ in InputReader(detect_input_format(sys.argv[1]), {"/v1/completions"}))
is_done.set()
watching.join()
print(n, (max(taken) - before) >> 20)
"""


def memory_taken(path: Path) -> tuple[int, int]:
    """The number of entries in the file, and the growth in MiB of a process that reads them."""
    done = subprocess.run([sys.executable, "-c", MOST_MEMORY, path], check=True, capture_output=True, text=True)
    n, grown = done.stdout.split()
    return int(n), int(grown)


def test_a_long_file_takes_no_memory(tmp_path: Path) -> None:
    line = json.dumps({"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "x" * 600}})
    (tmp_path / "in.jsonl").write_text(f"{line}\n" * 60_000)
    n, grown = memory_taken(tmp_path / "in.jsonl")
    assert (n, grown < 16) == (60_000, True), grown


@pytest.mark.parametrize(("name", "first"), [("in.jsonl", b""), ("in.csv", b'prompt\n"open quote')])
def test_a_line_without_end_takes_little_memory(tmp_path: Path, name: str, first: bytes) -> None:
    with open(tmp_path / name, "wb") as file:
        file.write(first)
        file.seek(200 << 20)  # a hole: zeros that take no room on the disk
        file.write(b'\n"b"\n')
    n, grown = memory_taken(tmp_path / name)
    assert (n, grown < 100) == (2, True), grown


def test_short_lines_after_an_open_quote_take_little_memory(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_bytes(b'prompt\n"open quote\n' + b"b\n" * 500_000)
    n, grown = memory_taken(tmp_path / "in.csv")
    assert (n, grown < 50) == (500_001, True), grown


def test_a_large_row_group_is_read_in_pieces(tmp_path: Path) -> None:
    texts = pa.array([f"{n:06}" * 2000 for n in range(12_000)])  # one row group, of 144 MB in pages of 12
    pq.write_table(pa.table({"prompt": texts}), tmp_path / "in.parquet", compression="none", use_dictionary=False)
    n, grown = memory_taken(tmp_path / "in.parquet")
    assert (n, grown < 130) == (12_000, True), grown
