"""Portable wheels of llama-cpp-python: flags, repair, how the installer chooses one, loading, and the release."""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib
import io
import os
import re
import shlex
import shutil
import sys
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml

from cppbatch.cli import doctor_command
from cppbatch.errors import LibraryError
from cppbatch.llama import library
from cppbatch.llama.backend import _VARIANT

ROOT = Path(__file__).parents[2]
GCC = "g++ (GCC) 12.2.0\nCopyright (C) 2022 Free Software Foundation, Inc."
VERSION = "0.3.36"
CPU = f"llama_cpp_python-{VERSION}-2cpu-py3-none-manylinux_2_34_x86_64.whl"
ARM = f"llama_cpp_python-{VERSION}-2cpu-py3-none-manylinux_2_38_aarch64.whl"
CUDA = f"llama_cpp_python-{VERSION}-1cuda-py3-none-manylinux_2_35_x86_64.whl"
MAC = f"llama_cpp_python-{VERSION}-2metal-py3-none-macosx_13_0_arm64.whl"
WINDOWS = f"llama_cpp_python-{VERSION}-2cpu-py3-none-win_amd64.whl"
FROM_PIP = f"llama_cpp_python-{VERSION}-py3-none-linux_x86_64.whl"
ALL = [CPU, ARM, CUDA, MAC, WINDOWS]

SetMachine = Callable[[str, str, str], None]


@pytest.fixture(scope="module")
def modules() -> Iterator[dict[str, Any]]:
    """The scripts, imported as they import each other."""
    names = ("install", "build_wheel")
    sys.path.insert(0, str(ROOT / "scripts"))
    found: dict[str, ModuleType] = {name: importlib.import_module(name) for name in names}
    yield found
    sys.path.remove(str(ROOT / "scripts"))
    for name in names:
        del sys.modules[name]


@pytest.fixture
def build_wheel(modules: dict[str, Any]) -> Any:
    return modules["build_wheel"]


@pytest.fixture
def install(modules: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The installer on a Linux machine of the x86-64 kind with glibc 2.36 and no GPU, without settings."""
    for name in ("CPPBATCH_BACKEND", "CPPBATCH_WHEELS", "CMAKE_ARGS", "CXX"):
        monkeypatch.delenv(name, raising=False)
    installer = modules["install"]
    monkeypatch.setattr(installer, "nvidia_gpus", list)
    set_machine_of(installer, monkeypatch)("Linux", "x86_64", "2.36")
    return installer


def set_machine_of(installer: Any, monkeypatch: pytest.MonkeyPatch) -> SetMachine:
    def set_machine(system: str, machine: str, release: str) -> None:
        monkeypatch.setattr(installer, "SYSTEM", system)
        monkeypatch.setattr("platform.machine", lambda: machine)
        monkeypatch.setattr("platform.libc_ver", lambda: ("glibc", release) if system == "Linux" else ("", ""))
        monkeypatch.setattr("platform.mac_ver", lambda: (release, ("", "", ""), machine))

    return set_machine


@pytest.fixture
def set_machine(install: Any, monkeypatch: pytest.MonkeyPatch) -> SetMachine:
    """Changes the system, the processor, and the version of glibc or of macOS."""
    return set_machine_of(install, monkeypatch)


def folder_with(folder: Path, names: list[str]) -> Path:
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).touch()
    return folder


# --- flags ------------------------------------------------------------------------------------------------------------


def test_a_portable_build_has_all_cpu_variants_rpc_and_media_and_no_dse_for_gcc(install: Any) -> None:
    flags = shlex.split(install.cmake_flags("cpu", GCC, portable=True))
    assert {
        "-DGGML_BACKEND_DL=ON", "-DGGML_CPU_ALL_VARIANTS=ON", "-DGGML_NATIVE=OFF", "-DGGML_RPC=ON", "-DLLAVA_BUILD=ON",
        "-DMTMD_VIDEO=OFF", "-DCMAKE_C_FLAGS=-fno-dse -fno-semantic-interposition",
        "-DCMAKE_CXX_FLAGS=-fno-dse -fno-semantic-interposition",
    } == set(flags)  # fmt: skip
    assert "-DGGML_CUDA=on" in install.cmake_flags("cuda", GCC, portable=True)


def test_a_native_build_has_these_flags(install: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are part of the key of wheels in users' caches."""
    gcc = "'-fno-dse -fno-semantic-interposition'"
    given = f"-DLLAVA_BUILD=ON -DMTMD_VIDEO=OFF -DGGML_RPC=ON -DCMAKE_C_FLAGS={gcc} -DCMAKE_CXX_FLAGS={gcc}"
    assert install.cmake_flags("cpu", GCC, portable=False) == given
    monkeypatch.setenv("CMAKE_ARGS", "-DX=1")
    assert install.cmake_flags("cpu", "clang", portable=False).endswith("-DGGML_RPC=ON -DX=1")


def test_on_a_mac_a_portable_build_is_one_library_with_metal(install: Any, set_machine: SetMachine) -> None:
    set_machine("Darwin", "arm64", "15.1")
    flags = install.cmake_flags("metal", "Apple clang", portable=True)
    assert "-DGGML_METAL=on" in flags
    assert "-DGGML_NATIVE=OFF" in flags
    assert "BACKEND_DL" not in flags


# --- choosing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("machine", "taken"),
    [
        (("Linux", "x86_64", "2.36"), CPU),
        (("Linux", "x86_64", "2.31"), None),
        (("Linux", "aarch64", "2.41"), ARM),
        (("Linux", "aarch64", "2.36"), None),
        (("Darwin", "arm64", "15.1"), MAC),
        (("Darwin", "arm64", "12.7"), None),
        (("Darwin", "x86_64", "15.1"), None),
        (("Windows", "AMD64", ""), WINDOWS),
    ],
)
def test_the_wheel_for_the_machine_is_taken(
    install: Any, set_machine: SetMachine, tmp_path: Path, machine: tuple[str, str, str], taken: str | None
) -> None:
    set_machine(*machine)
    place = folder_with(tmp_path / "wheels", [*ALL, "cppbatch-0.1.0-py3-none-any.whl", "SHA256SUMS"])
    if taken:
        assert install.taken_wheel(str(place), VERSION, ["metal", "cpu"]) == str(place / taken)
    else:
        with pytest.raises(SystemExit):
            install.taken_wheel(str(place), VERSION, ["metal", "cpu"])


def test_one_line_says_which_wheel_is_taken(
    install: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = folder_with(tmp_path / "wheels", ALL)
    monkeypatch.setenv("CPPBATCH_WHEELS", str(place))
    key, get_wheel = install.plan_wheel("")
    assert key.startswith(f"{install.pinned_version()} for cpu from {place} ")
    assert get_wheel() == str(place / CPU)
    assert capsys.readouterr().err == f"Taking {CPU} from {place}\n"


def test_without_a_fitting_wheel_the_message_names_the_required_one(
    install: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = folder_with(tmp_path / "wheels", [ARM, CPU.replace(VERSION, "0.3.1")])
    with pytest.raises(SystemExit):
        install.taken_wheel(str(place), VERSION, ["cuda", "cpu"])
    message = capsys.readouterr().err
    assert f"no wheel of llama-cpp-python {VERSION} for cuda or cpu on Linux x86_64 glibc 2.36. " in message
    assert ARM in message
    with pytest.raises(SystemExit):
        install.taken_wheel(str(folder_with(tmp_path / "empty", [])), VERSION, ["cpu"])
    assert "It has: no wheels." in capsys.readouterr().err


def test_the_backend_is_in_the_name(install: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPPBATCH_WHEELS", str(folder_with(tmp_path / "all", ALL)))
    monkeypatch.setattr(install, "nvidia_gpus", lambda: ["NVIDIA H100"])
    assert install.plan_wheel("")[1]().endswith(CUDA)
    monkeypatch.setenv("CPPBATCH_BACKEND", "cpu")
    assert install.plan_wheel("")[1]().endswith(CPU)
    monkeypatch.setenv("CPPBATCH_BACKEND", "vulkan")
    with pytest.raises(SystemExit):
        install.plan_wheel("")[1]()
    monkeypatch.delenv("CPPBATCH_BACKEND")
    monkeypatch.setenv("CPPBATCH_WHEELS", str(folder_with(tmp_path / "no_cuda", [CPU])))
    assert install.plan_wheel("")[1]().endswith(CPU), "a GPU needs no wheel of its own to run beside"


def test_one_file_and_a_wheel_that_pip_has_built_are_taken_too(install: Any, tmp_path: Path) -> None:
    place = folder_with(tmp_path / "wheels", [FROM_PIP])
    for given in (place, place / FROM_PIP):
        assert install.taken_wheel(str(given), VERSION, ["cpu"]) == str(place / FROM_PIP)


def test_a_new_file_in_the_folder_is_a_new_key(install: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = folder_with(tmp_path / "wheels", [CPU])
    monkeypatch.setenv("CPPBATCH_WHEELS", str(place))
    before = install.plan_wheel("")[0]
    assert install.plan_wheel("")[0] == before
    (place / CPU).write_bytes(b"another build")
    assert install.plan_wheel("")[0] != before


def test_an_installed_wheel_is_kept_until_another_one_is_requested(
    install: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a second `./scripts/serve` without CPPBATCH_WHEELS would compile for minutes."""
    monkeypatch.setattr(install, "find_compiler", lambda: GCC)
    monkeypatch.setenv("CPPBATCH_WHEELS", str(folder_with(tmp_path / "wheels", [CPU])))
    taken = install.plan_wheel("")[0]
    monkeypatch.delenv("CPPBATCH_WHEELS")
    assert install.plan_wheel(taken) == (taken, None)
    built = install.plan_wheel("")[0]
    assert built.startswith(f"{install.pinned_version()}-cpu-")
    assert install.plan_wheel(built)[0] == built
    assert install.plan_wheel(taken.replace(install.pinned_version(), "0.3.1"))[0] == built
    monkeypatch.setenv("CPPBATCH_BACKEND", "vulkan")
    assert install.plan_wheel(taken)[0].startswith(f"{install.pinned_version()}-vulkan-")


@pytest.mark.parametrize("place", ["/no/such/folder", "http://example.org/wheels"])
def test_a_missing_folder_and_an_insecure_address_are_refused(
    install: Any, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        install.taken_wheel(place, VERSION, ["cpu"])
    assert f"CPPBATCH_WHEELS={place} " in capsys.readouterr().err


def test_a_page_of_links_is_read_when_a_wheel_is_needed(install: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    page = "https://example.org/releases/expanded_assets/v1.0.0"
    asked: list[str] = []

    def urlopen(address: str, timeout: float) -> io.BytesIO:
        asked.append(address)
        links = [
            f'<a href="/download/v1.0.0/{CPU}#sha256=abc">', f"<a href='http://example.org/{CUDA}'>",
            '<a href="SHA256SUMS">',
        ]  # fmt: skip
        return io.BytesIO("\n".join(links).encode())

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    monkeypatch.setenv("CPPBATCH_WHEELS", page)
    key, get_wheel = install.plan_wheel("")
    assert (page in key, asked) == (True, [])
    assert get_wheel() == f"https://example.org/download/v1.0.0/{CPU}#sha256=abc"
    assert asked == [page]
    assert set(install.listed_wheels(page)) == {CPU}, "no link to an insecure address"
    direct = f"https://example.org/{CPU}"
    assert install.taken_wheel(direct, VERSION, ["cpu"]) == direct
    assert len(asked) == 2


def test_a_page_that_cannot_be_read_is_named(
    install: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def urlopen(_address: str, timeout: float) -> None:
        raise OSError("no route")

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    with pytest.raises(SystemExit):
        install.listed_wheels("https://example.org/wheels/")
    assert capsys.readouterr().err == "CPPBATCH_WHEELS=https://example.org/wheels/ cannot be read: no route\n"


# --- the repair -------------------------------------------------------------------------------------------------------

BUILT = {
    "bin/libggml-cpu-haswell.so": b"haswell GLIBC_2.34\0",
    "bin/libggml-cpu-armv8.2_1.so": b"arm",
    "bin/libggml-rpc.so": b"rpc GLIBC_2.9\0",
    "bin/libggml-base.so": b"a copy",
    "bin/llama-mtmd-cli": b"a program",
    "include/ggml.h": b"",
    "lib/libggml.so": b"a copy",
    "lib/cmake/ggml.cmake": b"",
    "llama_cpp/__init__.py": b"",
    "llama_cpp/lib/libggml.so": b"ggml GLIBC_2.2.5\0",
    "llama_cpp/lib/libggml.so.0": b"ggml",
    "llama_cpp/lib/libggml.so.0.25.3": b"ggml",
    "llama_cpp/lib/libggml-base.so": b"base",
    "llama_cpp/lib/libggml-base.so.0": b"base",
    f"llama_cpp_python-{VERSION}.dist-info/METADATA": b"Name: llama_cpp_python\n",
    f"llama_cpp_python-{VERSION}.dist-info/WHEEL": b"Wheel-Version: 1.0\nTag: py3-none-linux_x86_64\n\n",
    f"llama_cpp_python-{VERSION}.dist-info/RECORD": b"stale",
}


def repaired(build_wheel: Any, folder: Path) -> tuple[Path, list[tuple[str, dict[str, str]]]]:
    """The repaired wheel, and the changes requested for each library."""
    asked: list[tuple[str, dict[str, str]]] = []

    def relink(name: str, data: bytes, names: dict[str, str]) -> bytes:
        asked.append((name, names))
        return data + b"!"

    with zipfile.ZipFile(folder / FROM_PIP, "w") as wheel:
        for name, data in BUILT.items():
            wheel.writestr(name, data)
    return build_wheel.repair(folder / FROM_PIP, folder, "2cpu", relink), asked


def test_a_repaired_wheel_has_each_library_once_inside_the_package(build_wheel: Any, tmp_path: Path) -> None:
    path, asked = repaired(build_wheel, tmp_path)
    assert path.name == CPU, "with the libc that its newest symbol needs"
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted([FROM_PIP, CPU])
    kept = {"libggml.so", "libggml-base.so", "libggml-cpu-haswell.so", "libggml-cpu-armv8.2_1.so", "libggml-rpc.so"}
    with zipfile.ZipFile(path) as wheel:
        names = wheel.namelist()
        assert {name for name in names if name.endswith((".so", ".0", ".3"))} == {f"llama_cpp/lib/{n}" for n in kept}
        assert not [name for name in names if name.startswith(("bin/", "lib/", "include/"))]
        assert wheel.read("llama_cpp/lib/libggml-cpu-haswell.so") == BUILT["bin/libggml-cpu-haswell.so"] + b"!"
        modes = {oct(each.external_attr >> 16) for each in wheel.infolist() if each.filename.endswith(".so")}
        assert modes == {"0o755"}
    assert {name for name, _ in asked} == kept
    unversioned = {
        "libggml.so.0": "libggml.so", "libggml.so.0.25.3": "libggml.so", "libggml-base.so.0": "libggml-base.so"
    }  # fmt: skip
    assert all(names == unversioned for _, names in asked)


def test_the_metadata_of_a_repaired_wheel_are_those_of_its_files(build_wheel: Any, tmp_path: Path) -> None:
    path, _ = repaired(build_wheel, tmp_path)
    info = f"llama_cpp_python-{VERSION}.dist-info/"
    with zipfile.ZipFile(path) as wheel:
        lines = wheel.read(info + "WHEEL").decode().splitlines()
        assert lines == ["Wheel-Version: 1.0", "Build: 2cpu", "Tag: py3-none-manylinux_2_34_x86_64"]
        rows = {row[0]: row[1:] for row in csv.reader(io.StringIO(wheel.read(info + "RECORD").decode()))}
        assert rows.keys() == set(wheel.namelist())
        assert rows.pop(info + "RECORD") == ["", ""]
        for name, (digest, size) in rows.items():
            data = wheel.read(name)
            sha256 = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            assert (digest, int(size)) == (f"sha256={sha256}", len(data))


def test_the_version_of_glibc_is_also_that_of_systems_with_the_needed_libstdcxx(build_wheel: Any) -> None:
    assert build_wheel.needed_glibc(b"\0GLIBC_2.34\0GLIBCXX_3.4.29\0GLIBC_2.2.5\0") == 34
    assert build_wheel.needed_glibc(b"\0GLIBC_2.34\0GLIBCXX_3.4.30\0") == 35
    assert build_wheel.needed_glibc(b"a library of musl") == 0


def test_libraries_of_windows_move_and_stay_as_they_are(build_wheel: Any) -> None:
    names = ["bin/ggml-cpu-haswell.dll", "bin/ggml.dll", "bin/llama.dll", "llama_cpp/lib/ggml.dll", "lib/ggml.lib"]
    assert build_wheel.new_places(names) == {
        "bin/ggml-cpu-haswell.dll": "llama_cpp/lib/ggml-cpu-haswell.dll",
        "llama_cpp/lib/ggml.dll": "llama_cpp/lib/ggml.dll",
    }


def test_the_installer_recognises_the_names_of_repaired_wheels(install: Any, build_wheel: Any) -> None:
    assert set(build_wheel.BUILD_TAGS) == set(install.BACKENDS) - {"hip", "sycl"}
    for backend, tag in build_wheel.BUILD_TAGS.items():
        name = f"llama_cpp_python-{VERSION}-{tag}-py3-none-linux_x86_64.whl"
        assert install.backend_of_wheel(name, VERSION) == backend
    numbers = {backend: int(tag[0]) for backend, tag in build_wheel.BUILD_TAGS.items()}
    assert min(numbers["cpu"], numbers["metal"]) > max(numbers["cuda"], numbers["vulkan"]), "pip prefers the higher"


# --- loading ----------------------------------------------------------------------------------------------------------


class FakeGgml:
    """ggml's library, with these backends: those that it has from the start, or those that it loads."""

    _name = "/site/llama_cpp/lib/libggml.so"

    def __init__(self, built_in: list[bytes], loaded: list[bytes]) -> None:
        self.backends, self._loaded = built_in, loaded
        self.folders: list[bytes] = []

    def ggml_backend_reg_count(self) -> int:
        return len(self.backends)

    def ggml_backend_reg_by_name(self, name: bytes) -> int | None:
        return 1 if name in self.backends else None

    def ggml_backend_load_all_from_path(self, folder: bytes) -> None:
        self.folders.append(folder)
        self.backends = self._loaded


@pytest.mark.parametrize(
    ("built_in", "folders"), [([b"CPU"], []), ([], [os.fsencode(Path("/site/llama_cpp/lib"))])], ids=["native", "wheel"]
)
def test_a_portable_build_loads_its_backends_from_its_folder(
    monkeypatch: pytest.MonkeyPatch, built_in: list[bytes], folders: list[bytes]
) -> None:
    ggml = FakeGgml(built_in, [b"RPC", b"CPU"])
    monkeypatch.setattr(library, "ggml", lambda: ggml)
    library.load_backends()
    assert ggml.folders == folders


def test_without_a_kernel_for_the_cpu_the_message_says_what_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "ggml", lambda: FakeGgml([], [b"RPC"]))
    with pytest.raises(LibraryError, match=r"cannot be loaded from .*lib\. .*libgomp1"):
        library.load_backends()


@pytest.mark.parametrize(
    ("line", "variant"),
    [
        ("load_backend: loaded CPU backend from /a/llama_cpp/lib/libggml-cpu-sapphirerapids.so", "sapphirerapids"),
        ("load_backend: loaded CPU backend from /a/libggml-cpu-armv8.2_1.so", "armv8.2_1"),
        (r"load_backend: loaded CPU backend from C:\a\ggml-cpu-haswell.dll", "haswell"),
        ("load_backend: loaded RPC backend from /a/libggml-rpc.so", None),
    ],
)
def test_the_variant_of_the_cpu_is_in_llama_cpps_log(line: str, variant: str | None) -> None:
    found = _VARIANT.search(line)
    assert (found and found[1]) == variant


# --- the release ------------------------------------------------------------------------------------------------------

RELEASE = (ROOT / ".github/workflows/release.yml").read_text()


@pytest.fixture(scope="module")
def jobs() -> Any:
    return yaml.safe_load(RELEASE)["jobs"]


def test_the_release_runs_on_tags_and_names_scripts_that_exist() -> None:
    assert yaml.safe_load(RELEASE)[True] == {"push": {"tags": ["v*"]}}  # YAML reads `on` as true
    scripts = set(re.findall(r"scripts/\w+\.py", RELEASE))
    assert {"scripts/build_wheel.py", "scripts/install.py"} <= scripts
    assert all((ROOT / each).exists() for each in scripts)


def test_the_release_builds_a_wheel_for_each_platform_and_declares_no_flags(jobs: Any, build_wheel: Any) -> None:
    built = {each["name"]: each["backend"] for each in jobs["wheels"]["strategy"]["matrix"]["include"]}
    assert set(built.values()) == set(build_wheel.BUILD_TAGS)
    assert {"linux-x86_64", "linux-aarch64", "macos-arm64", "windows-x86_64"} <= {
        name for name, backend in built.items() if backend in ("cpu", "metal")
    }
    assert "-DGGML" not in RELEASE
    images = {each["machine"] for each in jobs["image"]["strategy"]["matrix"]["include"]}
    assert {f"linux-{machine}" for machine in images} <= set(built)


def test_nothing_is_published_before_everything_is_built_and_no_secret_is_used(jobs: Any) -> None:
    assert set(jobs["release"]["needs"]) == {"package", "wheels", "image"}
    assert jobs["publish"]["needs"] == "release"
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert "secrets." not in RELEASE
    assert {name for name, job in jobs.items() if "write" in str(job.get("permissions"))} == {"release", "publish"}
    assert "SHA256SUMS" in RELEASE


def test_the_image_takes_a_wheel_from_the_named_context_that_the_release_gives() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text()
    assert re.search(r"^FROM scratch AS wheels$", dockerfile, re.MULTILINE)
    assert "--mount=from=wheels,target=/wheels" in dockerfile
    assert "--build-context wheels=wheels" in RELEASE


# --- GPUs and what builds for them ------------------------------------------------------------------------------------

AMD, INTEL, NVIDIA = "0x1002", "0x8086", "0x10de"


@pytest.fixture
def set_cards(install: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes a tree like Linux's, with cards of a vendor at a place on the PCI bus."""

    def set_cards(*cards: tuple[str, str]) -> None:
        shutil.rmtree(tmp_path / "devices", ignore_errors=True)
        shutil.rmtree(tmp_path / "drm", ignore_errors=True)
        for i, (vendor, place) in enumerate(cards):
            device = tmp_path / "devices" / place
            (device / "drm").mkdir(parents=True)
            (device / "vendor").write_text(f"{vendor}\n")
            (device / "drm" / f"card{i}" / f"card{i}-DP-1").mkdir(parents=True)
            (tmp_path / "drm").mkdir(exist_ok=True)
            (device / "drm" / f"card{i}" / "device").symlink_to(device)
            (device / "drm" / f"card{i}" / f"card{i}-DP-1" / "device").symlink_to(device / "drm" / f"card{i}")
            (tmp_path / "drm" / f"card{i}").symlink_to(device / "drm" / f"card{i}")
            (tmp_path / "drm" / f"card{i}-DP-1").symlink_to(device / "drm" / f"card{i}" / f"card{i}-DP-1")
        monkeypatch.setattr(install, "DRM", tmp_path / "drm")
        monkeypatch.setattr(doctor_command, "_DRM", tmp_path / "drm")

    return set_cards


@pytest.fixture
def set_tools(install: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts these programs on the PATH, and Vulkan headers of this version into the first folder that is searched."""

    def set_tools(*programs: str, headers: tuple[int, int, int] | None = None) -> None:
        for name in programs:
            program = folder_with(tmp_path / "bin", [name]) / name
            program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path / "bin"))
        folder = tmp_path / "include"
        for name in ("CPATH", "VULKAN_SDK"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("CPLUS_INCLUDE_PATH", str(folder))
        monkeypatch.setattr(install, "INCLUDES", ())
        if headers:
            (folder / "vulkan").mkdir(parents=True, exist_ok=True)
            major, minor, patch = headers
            complete = (
                f"#define VK_HEADER_VERSION_COMPLETE VK_MAKE_API_VERSION(0, {major}, {minor}, VK_HEADER_VERSION)\n"
            )
            header = f"#define VK_HEADER_VERSION {patch}\n\n// Complete version of this file\n{complete}"
            (folder / "vulkan" / "vulkan_core.h").write_text(header)

    return set_tools


@pytest.mark.parametrize("card", [(AMD, "0000:03:00.0"), (INTEL, "0000:03:00.0"), (INTEL, "0000:00:02.0")])
def test_gpus_of_amd_and_intel_get_a_build_for_vulkan_where_its_tools_are(
    card: tuple[str, str], install: Any, set_cards: Callable[..., None], set_tools: Callable[..., None]
) -> None:
    set_cards(card)
    set_tools("glslc", headers=(1, 3, 261))
    assert install.pick_backend() == ("vulkan", "")


def test_without_tools_or_with_old_headers_the_build_is_for_the_cpu_and_says_why(
    install: Any, set_cards: Callable[..., None], set_tools: Callable[..., None]
) -> None:
    set_cards((INTEL, "0000:00:02.0"), (AMD, "0000:03:00.0"))
    set_tools()
    help_ = "Debian/Ubuntu: sudo apt install libvulkan-dev glslc spirv-headers"
    said = "There is an AMD GPU, but this builds for the CPU: a build for Vulkan needs "
    assert install.pick_backend() == ("cpu", f"{said}its headers and glslc. {help_}")
    set_tools("glslc")
    assert install.pick_backend()[1].startswith(f"{said}headers of 1.3.261 or newer, and there are none. {help_}")
    set_tools("glslc", headers=(1, 3, 239))
    assert install.pick_backend() == (
        "cpu",
        f"{said}headers of 1.3.261 or newer, not 1.3.239. {help_}; where these are older, put newer ones into "
        "CPLUS_INCLUDE_PATH (docs/gpu.md).",
    )
    set_tools("glslc", headers=(1, 4, 309))
    assert install.pick_backend() == ("vulkan", "")


def test_an_integrated_gpu_without_tools_and_a_machine_without_gpus_are_built_for_the_cpu_silently(
    install: Any, set_cards: Callable[..., None], set_tools: Callable[..., None]
) -> None:
    set_tools()
    set_cards((INTEL, "0000:00:02.0"), ("0x1a03", "0000:05:00.0"))  # a server's screen
    assert install.pick_backend() == ("cpu", "")
    set_tools("glslc", headers=(1, 4, 309))
    set_cards()
    assert install.pick_backend() == ("cpu", "")


def test_a_requested_backend_whose_tools_are_missing_is_refused_before_the_build(
    install: Any, set_tools: Callable[..., None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    set_tools("glslc", headers=(1, 3, 239))
    monkeypatch.setattr(install, "find_compiler", lambda: GCC)
    monkeypatch.setattr(install, "find_nvcc", lambda: None)
    monkeypatch.setattr(install, "output_of", lambda *_: "")
    tools = {"vulkan": "headers of 1.3.261", "cuda": "nvcc", "hip": "hipconfig", "sycl": "icpx"}
    for backend, tool in tools.items():
        with pytest.raises(SystemExit):
            install.check_build_tools(install.plan_build(backend))
        message = capsys.readouterr().err
        assert message.startswith(f"CPPBATCH_BACKEND={backend}: a build for ")
        assert tool in message


def test_a_wheel_for_vulkan_is_taken_for_a_gpu_whose_driver_is_there(
    install: Any, tmp_path: Path, set_cards: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    vulkan = FROM_PIP.replace(VERSION, f"{VERSION}-1vulkan")
    monkeypatch.setenv("CPPBATCH_WHEELS", str(folder_with(tmp_path / "wheels", [vulkan, CPU])))
    set_cards((AMD, "0000:03:00.0"))
    for driver, taken in (("libvulkan.so.1", vulkan), (None, CPU)):
        monkeypatch.setattr(install, "find_library", lambda _name, found=driver: found)
        assert install.plan_wheel("")[1]().endswith(taken)


def test_doctor_names_a_gpu_that_the_library_cannot_use_and_the_command_that_changes_it(
    install: Any, tmp_path: Path, set_cards: Callable[..., None]
) -> None:
    folder = folder_with(tmp_path / "lib", ["libggml-base.so", "libggml-cpu.so"])
    backend: Any = SimpleNamespace(supports_gpu=False, library_path=str(folder / "libllama.so"))
    assert list(doctor_command._unused_gpus(backend)) == []
    set_cards((INTEL, "0000:00:02.0"))
    (found,) = doctor_command._unused_gpus(backend)
    assert (found.name, found.is_note, found.remedy) == ("gpu", False, None)
    set_cards((AMD, "0000:03:00.0"))
    (found,) = doctor_command._unused_gpus(backend)
    assert found.is_note
    assert found.found.startswith("AMD")
    assert "CPPBATCH_BACKEND=vulkan python3 scripts/install.py builds for it" in found.found
    set_cards((NVIDIA, "0000:04:00.0"))
    (found,) = doctor_command._unused_gpus(backend)
    assert "once CUDA's toolkit is installed, python3 scripts/install.py" in found.found
    (folder / "libggml-vulkan.so").touch()
    (found,) = doctor_command._unused_gpus(backend)
    assert "its driver shows none" in found.found
    backend.supports_gpu = True
    assert list(doctor_command._unused_gpus(backend)) == []
