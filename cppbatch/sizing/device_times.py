"""The times of matrix products on each device, measured once and cached by device: what a placement is chosen by.

`python -m cppbatch.sizing.device_times` is the child process that measures: a driver may crash it.
"""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterable, Sequence

import msgspec

from cppbatch import child_processes
from cppbatch.config import EngineConfig
from cppbatch.errors import LlamaError
from cppbatch.findings import build_key, finding_path, library_folder, read_finding, write_finding
from cppbatch.models.kernels import DeviceTimes
from cppbatch.sizing.estimate import Device

log = logging.getLogger("cppbatch.memory")

CPU = "CPU"
ROWS = (1, 4, 16, 512)
"""The numbers of rows that are timed."""


class _Task(msgspec.Struct, frozen=True):
    config: EngineConfig
    devices: dict[str, int]
    """With the bytes of their memory that the measurement may use."""
    kinds: list[str]
    n_threads: int


def device_times(
    config: EngineConfig, found: Sequence[Device], kinds: Iterable[str], *, n_threads: int
) -> dict[str, DeviceTimes] | None:
    """The times of the CPU and of these devices, by name; measured unless they are cached: a few seconds for each.

    `kinds`: types of weights, by ggml's names. None if one of them cannot be measured, with a line in the log.
    """
    folder = library_folder()
    path = folder and finding_path("devices", build_key(folder))
    keys = {CPU: f"{CPU} {n_threads}", **{each.name: _key(each) for each in found}}
    known = (path and read_finding(path, dict[str, DeviceTimes])) or {}
    wanted = list(dict.fromkeys(kinds))
    missing = [name for name, key in keys.items() if key not in known or not {*wanted} <= known[key].ms.keys()]
    if missing:
        room = {each.name: each.free // 4 for each in found if each.free}
        sizes = {name: max(_LEAST_BYTES, min(_MOST_BYTES, room.get(name, _MOST_BYTES))) for name in missing}
        measured = _measure(_Task(config, sizes, wanted, n_threads))
        if measured is None:
            return None
        for name, times in measured.items():
            earlier = known.pop(keys[name], None)
            known[keys[name]] = msgspec.structs.replace(times, ms={**(earlier.ms if earlier else {}), **times.ms})
        if path:
            write_finding(path, dict(list(known.items())[-64:]))  # the latest devices
    return {name: known[key] for name, key in keys.items()}


_LEAST_BYTES, _MOST_BYTES = 4 << 20, 192 << 20  # of a matrix: more than most caches, if there is room


def _key(device: Device) -> str:
    """The key of a device; for an RPC worker without its port, which changes at each start of a test or a tunnel."""
    return f"{device.name.partition(':')[0] if not device.description else device.description} {device.total}"


def _measure(task: _Task) -> dict[str, DeviceTimes] | None:
    try:
        command = child_processes.child_command("cppbatch.sizing.device_times")
        done = child_processes.run(command, stdin=msgspec.json.encode(task), seconds=120)
        return msgspec.json.decode(done.stdout.rpartition(b"\n")[2], type=dict[str, DeviceTimes])
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("the speed of %s cannot be measured: %s", " and ".join(task.devices), error)
    except msgspec.DecodeError:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        log.warning("the speed of %s cannot be measured: %s", " and ".join(task.devices), last[0])
    return None


def main() -> None:
    """Reads a `_Task` and prints the times of its devices by name, as JSON on the last line."""
    from cppbatch.llama.device_speed import measure_products
    from cppbatch.sizing.estimate_child import connect, devices

    task = msgspec.json.decode(sys.stdin.buffer.read(), type=_Task)
    connections = connect([task.config])
    names = {each.name: each.buffer_types[0] if each.buffer_types else each.name for each in devices(task.config)}
    try:
        times = {
            name: measure_products(names.get(name, name), task.kinds, ROWS, n_bytes=n_bytes, n_threads=task.n_threads)
            for name, n_bytes in task.devices.items()
        }
    except LlamaError as error:
        sys.exit(str(error))
    finally:
        connections.close()
    sys.stdout.buffer.write(b"\n" + msgspec.json.encode(times))


if __name__ == "__main__":
    main()
