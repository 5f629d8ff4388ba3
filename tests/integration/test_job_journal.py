"""A job's results on disk beside other processes, and on a full disk."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cppbatch.errors import InUse
from cppbatch.jobs.journal import Ledger
from tests.support.job_results import ids_of, item, opened, result


def test_a_ledger_in_use_is_refused(tmp_path: Path) -> None:
    Ledger(tmp_path / "job").close()
    code = f"""
import time
from pathlib import Path
from cppbatch.jobs.journal import Ledger
ledger = Ledger(Path({str(tmp_path / "job")!r}))
print("open", flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        try:
            with pytest.raises(InUse, match="is in use by another cppbatch"):
                Ledger(tmp_path / "job")
        finally:
            other.kill()
    Ledger(tmp_path / "job").close()  # a process that was killed holds nothing


def test_a_full_disk_leaves_nothing_half_written(tmp_path: Path) -> None:
    """The limit on a file's size simulates a full disk."""
    code = f"""
import resource, signal
from pathlib import Path
from cppbatch.errors import StorageError
from tests.support.job_results import item, opened, result
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
journal = opened(Path({str(tmp_path)!r}))
items = [item(i) for i in range(1, 1001)]
journal.register(items)
journal.record([result(each) for each in items[:100]])
size = journal._output.size
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 1000, size + 1000))
try:
    journal.record([result(each) for each in items[100:]])
except StorageError as error:
    print(error)
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    assert "out.jsonl cannot be written (File too large): free some space and restart" in said
    assert len(ids_of(tmp_path / "out.jsonl")) == 100
    journal = opened(tmp_path)
    items = [item(i) for i in range(1, 1001)]
    assert journal.register(items) == items[100:]
    journal.record([result(each) for each in items[100:]])
    assert ids_of(tmp_path / "out.jsonl") == [each.custom_id for each in items]
