"""The child process of `cppbatch rpc-worker`. It runs llama.cpp's RPC server, which invalid input can crash.

Start it with `python -m cppbatch.llama.rpc_server_child`, and the address, devices, threads and cache folder as a line
of JSON on the standard input. It prints the devices, and ends when the standard input is closed.
"""

from __future__ import annotations

import json
import os
import sys
import threading

from cppbatch.errors import CppBatchError
from cppbatch.llama.backend import Backend
from cppbatch.llama.rpc import choose_devices, serve_devices
from cppbatch.rpc_endpoint import Endpoint

_GIB = 2**30


def main() -> None:
    """Serves until the process is killed or the standard input is closed."""
    setup = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_exit_with_parent, name="cppbatch-parent", daemon=True).start()
    try:
        devices = {device.name: device for device in Backend.get().devices()}
        names = choose_devices(setup["devices"])
        found = [
            f"{name} ({devices[name].description}, {devices[name].memory_free / _GIB:.1f} GiB free)" for name in names
        ]
        print(", ".join(found), flush=True)
        endpoint = Endpoint(setup["host"], setup["port"])
        serve_devices(endpoint, names, n_threads=setup["n_threads"], cache=setup["cache"])
    except CppBatchError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        os._exit(2)


def _exit_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


if __name__ == "__main__":
    main()
