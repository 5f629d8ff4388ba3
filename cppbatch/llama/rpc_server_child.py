"""The child process of `cppbatch rpc-worker`. It runs llama.cpp's RPC server, which invalid input can crash.

It reads the address, devices, threads and cache folder as a line of JSON from the standard input, and prints the
devices.
"""

from __future__ import annotations

import json
import os
import sys

from cppbatch.errors import CppBatchError
from cppbatch.llama.backend import Backend
from cppbatch.llama.rpc import choose_devices, serve_devices
from cppbatch.rpc_endpoint import Endpoint


def main() -> None:
    """Serves until the process is killed."""
    setup = json.loads(sys.stdin.buffer.readline())
    try:
        devices = {device.name: device for device in Backend.get().devices()}
        names = choose_devices(setup["devices"])
        found = [
            f"{name} ({devices[name].description}, {devices[name].memory_free / 2**30:.1f} GiB free)" for name in names
        ]
        print(", ".join(found), flush=True)
        endpoint = Endpoint(setup["host"], setup["port"])
        serve_devices(endpoint, names, n_threads=setup["n_threads"], cache=setup["cache"])
    except CppBatchError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        os._exit(2)


if __name__ == "__main__":
    main()
