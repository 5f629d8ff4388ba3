"""A job's results on disk beside other processes, and on a full disk."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cppbatch.errors import InUse
from cppbatch.jobs.ledger import Ledger
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


ON_A_DISK_OF_4_MB = """
import asyncio, os, sys
from pathlib import Path
from cppbatch.errors import DiskFull
from cppbatch.jobs.batches.data_folder import open_data_folder
from cppbatch.jobs.batches.store import File

folder = Path(sys.argv[1])

def fill():
    with open(folder.parent / "of-another-program", "ab", buffering=0) as file:
        while True:
            try:
                file.write(bytes(4096))
            except OSError:
                return

async def main():
    data = open_data_folder(folder)
    for i in range(24):
        data.incoming(f"file-{i}").write_bytes(bytes(3))
        await data.add_file(File(id=f"file-{i}", bytes=3, created_at=1, filename="a", purpose="batch"))
    fill()
    try:
        data.incoming("file-x").write_bytes(bytes(8192))
        print("not full")
    except OSError:
        data.incoming("file-x").unlink()
    for i in range(12):
        await data.delete_file(f"file-{i}")
        fill()
    data.close()
    fill()
    data = open_data_folder(folder)
    for i in range(12, 24):
        await data.delete_file(f"file-{i}")
        fill()
    print(len(os.listdir(folder / "files")), "left")
    data.close()

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="mounts a disk in a namespace of its own")
def test_files_can_be_deleted_on_a_disk_that_another_program_has_filled(tmp_path: Path) -> None:
    """Also after a start on the full disk, and although the other program takes all that becomes free."""
    mount = "mount -t tmpfs -o size=4m tmpfs "
    if subprocess.run(
        ["unshare", "-rm", "sh", "-c", f"{mount} {tmp_path}"], check=False, capture_output=True
    ).returncode:
        pytest.skip("cannot mount a disk in a user namespace")
    (tmp_path / "disk").mkdir()
    command = f"{mount} {tmp_path}/disk && exec {sys.executable} -c '{ON_A_DISK_OF_4_MB}' {tmp_path}/disk/data"
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", command], check=False, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "0 left\n"), done.stderr
