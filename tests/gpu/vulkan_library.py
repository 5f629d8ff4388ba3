"""Finds llama.cpp's library for Vulkan, and checks that it has a device.

`python -m tests.gpu.vulkan_library` prints a folder for PYTHONPATH, which has llama_cpp with that library, or what is
missing on this machine. The packages of .venv are used beside it.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from ctypes.util import find_library
from pathlib import Path

from platformdirs import user_cache_path

sys.path.append(str(Path(__file__).parents[2] / "scripts"))
import install

_NO_DRIVER = "No driver for Vulkan found: install one (Debian/Ubuntu: sudo apt install mesa-vulkan-drivers libvulkan1)."
_NO_LIBRARY = (
    "No library for Vulkan found: name a folder with a wheel for Vulkan in CPPBATCH_WHEELS, or build one with "
    "CPPBATCH_BACKEND=vulkan python3 scripts/install.py in a clone of its own."
)
_DEVICES = """
from cppbatch.llama import Backend
print(*(f"{each.name}: {each.description}" for each in Backend.get().devices() if "GPU" in each.kind), sep=", ")
"""


class NoVulkanError(Exception):
    """No usable library or device. The text is one line for the user."""


def find_wheel() -> Path:
    """The wheel for Vulkan: of CPPBATCH_WHEELS, or the latest that scripts/install.py has built on this machine."""
    version = install.pinned_version()
    if place := os.environ.get("CPPBATCH_WHEELS"):
        return Path(install.taken_wheel(place, version, ["vulkan"]))
    built = install.wheels_folder().glob(f"{version}-vulkan-*/*.whl")
    if not (found := sorted(built, key=lambda wheel: wheel.stat().st_mtime)):
        raise NoVulkanError(_NO_LIBRARY)
    return found[-1]


def unpack(wheel: Path) -> Path:
    """The folder with the files of a wheel, in the user's cache."""
    stat = wheel.stat()
    key = hashlib.sha256(f"{wheel} {stat.st_size} {stat.st_mtime_ns}".encode()).hexdigest()[:16]
    folder = user_cache_path("cppbatch") / "vulkan" / key
    if not (folder / "complete").exists():
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
        (folder / "complete").touch()
    return folder


def main() -> None:
    try:
        if not find_library("vulkan"):
            raise NoVulkanError(_NO_DRIVER)
        folder = unpack(find_wheel())
        env = {**os.environ, "PYTHONPATH": str(folder)}
        done = subprocess.run([sys.executable, "-c", _DEVICES], env=env, text=True, capture_output=True, check=True)
        if not done.stdout.strip():
            raise NoVulkanError(_NO_DRIVER)
        print(f"Vulkan: {done.stdout.strip()}", file=sys.stderr)
        print(folder)
    except NoVulkanError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
