"""Makes .venv ready: takes or builds a wheel of llama-cpp-python, then installs cppbatch (editable).

Usage: python3 scripts/install.py [--dev] [--browser] [--ray]      (on Windows: py scripts\\install.py)
Environment: CPPBATCH_WHEELS, a folder or an https address with a wheel of llama-cpp-python; without it one is built,
once for this machine. CPPBATCH_BACKEND=cuda|metal|vulkan|hip|sycl|cpu, CMAKE_ARGS, CXX.
Standard library only, and no syntax newer than Python 3.6, so that an old Python gets a clear message.
"""

import argparse
import contextlib
import functools
import hashlib
import html
import importlib.util
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from ctypes.util import find_library
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

OLDEST_PYTHON = (3, 10)
SYSTEM = platform.system()
WINDOWS = SYSTEM == "Windows"
ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
BIN = VENV / ("Scripts" if WINDOWS else "bin")
PYTHON = BIN / ("python.exe" if WINDOWS else "python")
STAMP = VENV / "cppbatch-install.txt"
BACKENDS = ("cuda", "metal", "vulkan", "hip", "sycl", "cpu")
DRM = Path("/sys/class/drm")
VENDORS = {"0x1002": "AMD", "0x8086": "Intel"}  # PCI's numbers, as in cppbatch/cli/doctor_command.py
INTEGRATED = "0000:00:02.0"  # the place on the bus of the GPU in Intel's processors
OLDEST_VULKAN = (1, 3, 261)  # the headers' version: llama.cpp uses LayerSettingEXT
INCLUDES = ("/usr/local/include", "/usr/include")
VULKAN_HELP = "Debian/Ubuntu: sudo apt install libvulkan-dev glslc spirv-headers"
GROUPS = ("dev", "browser")  # dependency groups of pyproject.toml; other names are extras
EXTRAS = ("chat", "hub", "llama", "media")  # installed always
WHEEL = re.compile(r"llama_cpp_python-([^-]+)-(?:\d+([a-z]*)-)?(\w+)-none-([\w.]+)\.whl")
PLATFORM = re.compile(r"(linux|manylinux|macosx|win)_(?:(\d+)_(\d+)_)?(\w+)")
SYSTEMS = {"linux": "Linux", "manylinux": "Linux", "macosx": "Darwin", "win": "Windows"}
COMPILER_HELP = {
    "Linux": "Debian/Ubuntu: sudo apt install build-essential; Fedora: sudo dnf install gcc-c++; "
    "Arch: sudo pacman -S base-devel",
    "Darwin": "Run: xcode-select --install (or: brew install llvm)",
    "Windows": "Install Visual Studio Build Tools with 'Desktop development with C++'",
}


class Build(NamedTuple):
    """One way to build llama-cpp-python. `key` names it; `covers` is the text that the key contains a hash of."""

    version: str
    backend: str
    cmake_args: str
    key: str
    covers: str


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # stdout belongs to the program that is started afterwards


def fail(text: str, code: int = 1) -> NoReturn:
    say(text)
    sys.exit(code)


def output_of(*command: str) -> str:
    """What a command prints, untranslated; "" when it is missing or fails."""
    env = {**os.environ, "LC_ALL": "C"}
    no = subprocess.DEVNULL
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        out = subprocess.check_output(command, env=env, stdin=no, stderr=no, timeout=30)
        return out.decode(errors="replace").strip()
    return ""


def find_compiler() -> str:
    """The C++ compiler's --version text, or "". It is run because macOS has a c++ that only asks for Xcode."""
    if WINDOWS:
        return "Visual Studio"  # not on the PATH; CMake finds it
    named = os.environ.get("CXX")
    candidates = [shlex.split(named)] if named else [["c++"], ["g++"], ["clang++"]]
    return next(filter(None, (output_of(*words, "--version") for words in candidates)), "")


def find_nvcc() -> "str | None":
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    folders = [os.environ.get("PATH", ""), *(str(Path(home, "bin")) for home in homes if home)]
    return shutil.which("nvcc", path=os.pathsep.join(folders))


def nvidia_gpus() -> "list[str]":
    """Names of the GPUs that an NVIDIA driver serves. /proc first: nvidia-smi can take seconds."""
    driver = Path("/proc/driver/nvidia")
    if any(Path("/dev").glob("nvidia[0-9]*")):  # a container may see the host's /proc but have no GPU
        text = "\n".join(info.read_text() for info in sorted(driver.glob("gpus/*/information")))
        names = re.findall(r"^Model:\s*(.+)$", text, re.MULTILINE)
        if names or (driver / "version").exists():
            return names or ["unknown model"]
    return re.findall(r"^GPU \d+: (.+?)(?: \(UUID.*)?$", output_of("nvidia-smi", "-L"), re.MULTILINE)


def vulkan_gpus() -> "list[str]":
    """The GPUs of AMD and Intel that the kernel lists; it needs no driver for Vulkan to do so."""
    found = []
    for file in sorted(DRM.glob("card[0-9]*/device/vendor")):
        vendor = VENDORS.get(file.read_text().strip())
        is_integrated = vendor == "Intel" and file.parent.resolve().name == INTEGRATED
        if vendor:
            found.append(f"integrated {vendor}" if is_integrated else vendor)
    return found


def vulkan_headers() -> "tuple[int, ...]":
    """The version of the Vulkan headers that the compiler finds first; () if there are none."""
    listed = [os.environ.get(name, "") for name in ("CPATH", "CPLUS_INCLUDE_PATH")]
    sdk = os.environ.get("VULKAN_SDK")
    folders = [*os.pathsep.join(listed).split(os.pathsep), f"{sdk}/include" if sdk else "", *INCLUDES]
    for folder in filter(None, folders):
        with contextlib.suppress(OSError):
            text = Path(folder, "vulkan", "vulkan_core.h").read_text(errors="replace")
            patch = re.search(r"^#define VK_HEADER_VERSION (\d+)", text, re.MULTILINE)
            version = re.search(r"^#define VK_HEADER_VERSION_COMPLETE \w+\(\d+, (\d+), (\d+),", text, re.MULTILINE)
            if patch and version:
                return int(version[1]), int(version[2]), int(patch[1])
    return ()


def missing_for(backend: str) -> str:
    """What a build for this backend lacks on this machine, as a sentence with the remedy; "" if nothing."""
    if backend == "cuda" and not find_nvcc():
        return "a build for CUDA needs the CUDA toolkit: no nvcc on the PATH or in CUDA_HOME."
    if backend == "hip" and not shutil.which("hipconfig"):
        return "a build for HIP needs AMD's ROCm, with hipconfig on the PATH."
    if backend == "sycl" and not shutil.which("icpx"):
        return "a build for SYCL needs Intel's oneAPI compiler, with icpx on the PATH (source setvars.sh)."
    if backend == "vulkan" and not shutil.which("glslc"):
        return f"a build for Vulkan needs its headers and glslc. {VULKAN_HELP}"
    if backend == "vulkan" and SYSTEM == "Linux" and vulkan_headers() < OLDEST_VULKAN:
        oldest = ".".join(map(str, OLDEST_VULKAN))
        found = ".".join(map(str, vulkan_headers()))
        have = f"not {found}" if found else "and there are none"
        return (
            f"a build for Vulkan needs headers of {oldest} or newer, {have}. "
            f"{VULKAN_HELP}; where these are older, put newer ones into CPLUS_INCLUDE_PATH (docs/gpu.md)."
        )
    return ""


def pick_backend() -> "tuple[str, str]":
    """The backend, and a note for the user (may be "")."""
    wanted = os.environ.get("CPPBATCH_BACKEND")
    if wanted and wanted not in BACKENDS:
        fail(f"CPPBATCH_BACKEND={wanted} is not known; it can be one of: {', '.join(BACKENDS)}.", 2)
    if wanted:
        return wanted, ""
    if SYSTEM == "Darwin" and platform.machine() == "arm64":
        return "metal", ""
    if nvidia_gpus():  # nvcc alone does not mean a GPU
        if not missing_for("cuda"):
            return "cuda", ""
        return "cpu", "There is an NVIDIA GPU but no CUDA toolkit (nvcc), so this builds for the CPU."
    gpus = vulkan_gpus()
    missing = missing_for("vulkan")
    if not gpus or not missing:
        return "vulkan" if gpus else "cpu", ""
    separate = [gpu for gpu in gpus if not gpu.startswith("integrated")]  # almost every laptop has an integrated one
    return "cpu", f"There is an {separate[0]} GPU, but this builds for the CPU: {missing}" if separate else ""


def cmake_flags(backend: str, compiler: str, portable: bool) -> str:
    """All flags of all builds. `portable`: for other machines too; else for the CPU that builds."""
    flags = ["-DLLAVA_BUILD=ON", "-DMTMD_VIDEO=OFF", "-DGGML_RPC=ON"]
    if portable:
        flags.append("-DGGML_NATIVE=OFF")
        if SYSTEM != "Darwin":  # a library for each kind of CPU, of which the program loads the best
            flags += ["-DGGML_BACKEND_DL=ON", "-DGGML_CPU_ALL_VARIANTS=ON"]
    if backend != "cpu":
        flags.append(f"-DGGML_{backend.upper()}=on")
    elif SYSTEM == "Darwin":
        flags.append("-DGGML_METAL=off")  # on a Mac it is on by default
    # GCC 12 removes a store that AMX needs, as dead, and the library then crashes at the first decode on
    # a CPU with AMX (llama.cpp PR #26954). And for a shared library GCC neither inlines nor specialises exported
    # functions: with BF16 weights, a row takes 5 to 10% longer.
    if "Free Software Foundation" in compiler and platform.machine() in ("x86_64", "AMD64"):
        flags += [f"-DCMAKE_{language}_FLAGS='-fno-dse -fno-semantic-interposition'" for language in ("C", "CXX")]
    return " ".join([*flags, os.environ.get("CMAKE_ARGS", "")]).strip()


def describe_cpu() -> str:
    """llama.cpp is compiled for the very CPU it is built on, so another one needs another wheel."""
    if SYSTEM == "Darwin":
        return "cpu: " + output_of("sysctl", "-n", "machdep.cpu.brand_string")
    if SYSTEM != "Linux":
        return "cpu: " + platform.processor()
    first = Path("/proc/cpuinfo").read_text(errors="replace").split("\n\n", 1)[0]
    return "\n".join(re.findall(r"^(?:model name|flags|Features|CPU .*)\s*:.*$", first, re.MULTILINE))


def pinned_version() -> str:
    pinned = re.search(r'"llama-cpp-python==([^"\s;]+)', (ROOT / "pyproject.toml").read_text("utf-8"))
    return pinned[1] if pinned else fail("pyproject.toml does not pin llama-cpp-python==<version>.")


def plan_build(backend: str, portable: bool = False) -> Build:
    version = pinned_version()
    compiler = output_of("icpx", "--version") if backend == "sycl" else find_compiler()
    cmake_args = cmake_flags(backend, compiler, portable)
    lines = [
        f"llama-cpp-python {version} for {backend} on {SYSTEM} {platform.machine()}",
        f"CMAKE_ARGS: {cmake_args}",
        f"compiler: {compiler.partition(chr(10))[0]}",
        describe_cpu(),
    ]
    if backend == "cuda":  # compiled for the GPUs that are present
        nvcc = output_of(find_nvcc() or "nvcc", "--version").splitlines()[-1:]
        lines += [f"nvcc: {' '.join(nvcc)}", f"GPUs: {', '.join(nvidia_gpus())}"]
    covers = "\n".join(lines) + "\n"
    digest = hashlib.sha256(covers.encode()).hexdigest()[:12]
    return Build(version, backend, cmake_args, f"{version}-{backend}-{digest}", covers)


def wheels_folder() -> Path:
    """Outside the checkout, so that a machine builds once. pip's own wheel cache will not do: it does not
    know CMAKE_ARGS and would hand back a wheel that was built with other flags."""
    default = {"Darwin": "~/Library/Caches", "Windows": os.environ.get("LOCALAPPDATA")}.get(SYSTEM)
    cache = os.environ.get("XDG_CACHE_HOME") or default or "~/.cache"
    return Path(cache).expanduser().resolve() / "cppbatch" / "wheels"


def check_build_tools(build: Build) -> None:
    """CMake and ninja come from pip; missing programs that pip cannot install are named before the build."""
    if not find_compiler():
        tried = f" (CXX is {os.environ['CXX']})" if os.environ.get("CXX") else ""
        fail(f"No C++ compiler found{tried}. {COMPILER_HELP.get(SYSTEM, 'Please install one.')}")
    missing = missing_for(build.backend)
    if missing:
        fail(f"CPPBATCH_BACKEND={build.backend}: {missing}")


def wait_showing_time(process: "subprocess.Popen[Any]") -> int:
    seconds, end = (2, "\r") if sys.stderr.isatty() else (30, "\n")
    began = time.monotonic()
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(timeout=seconds)
        elapsed = time.strftime("%M:%S", time.gmtime(time.monotonic() - began))
        print(f"  still building, {elapsed}", end=end, file=sys.stderr, flush=True)


def stop(process: "subprocess.Popen[Any]") -> None:
    """Ends pip and the compilers below it. An interrupt first: pip then removes its temporary files."""
    if sys.platform == "win32":
        process.terminate()
        return
    with contextlib.suppress(OSError):  # the group is gone: done
        os.killpg(process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=10)
        os.killpg(process.pid, signal.SIGKILL)


def compile_wheel(build: Build, folder: Path, python: str) -> int:
    """Runs the build with its output in folder/build.log, in a separate process group for stop()."""
    env = {**os.environ, "CMAKE_ARGS": build.cmake_args}
    if build.backend == "cuda":
        env.setdefault("CUDACXX", find_nvcc() or "nvcc")  # CMake itself looks on the PATH only
    elif build.backend == "hip":
        env.setdefault("HIPCXX", output_of("hipconfig", "-l") + "/clang")
        env.setdefault("HIP_PATH", output_of("hipconfig", "-R"))
    elif build.backend == "sycl":
        env.update(CC="icx", CXX="icpx")
    flags = ["-v", "--no-cache-dir", "--no-deps", "--no-binary", "llama-cpp-python", "-w", str(folder)]
    command = [python, "-m", "pip", "wheel", *flags, f"llama-cpp-python=={build.version}"]
    with open(folder / "build.log", "wb") as log:
        process = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
        try:
            return wait_showing_time(process)
        except BaseException:
            stop(process)
            raise


def find_wheel(folder: Path) -> "Path | None":
    return next(folder.glob("llama_cpp_python-*.whl"), None)


def fail_with_log(log: Path, hint: str) -> NoReturn:
    say("\n".join(log.read_text(errors="replace").splitlines()[-30:]))
    say(f"Building llama-cpp-python failed; above is the end of {log}")
    fail("Look there for the first error, often a missing package or an option in CMAKE_ARGS." + hint)


def built_wheel(build: Build, remark: str) -> str:
    """The wheel of this key, built if need be. A folder gets its final name only when it is complete."""
    if remark:
        say(remark)
    folder = wheels_folder() / build.key
    wheel = find_wheel(folder)
    if wheel:
        return str(wheel)
    check_build_tools(build)
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f"{build.key}.building-", dir=folder.parent))
    minutes, hint = "4-5 minutes", ""
    if build.backend != "cpu":
        minutes, hint = "5-20 minutes", " CPPBATCH_BACKEND=cpu builds without the GPU."
    elif WINDOWS:
        hint = f" {COMPILER_HELP[SYSTEM]}."
    say(f"Building llama-cpp-python {build.version} for {build.backend}: {minutes}, once on this machine.")
    try:
        if compile_wheel(build, work, str(PYTHON)) != 0:
            fail_with_log((work / "build.log").replace(folder.with_name(f"{build.key}.failed.log")), hint)
        (work / "KEY.txt").write_bytes(build.covers.encode())
        if not find_wheel(folder):
            shutil.rmtree(folder, ignore_errors=True)
            with contextlib.suppress(OSError):  # another run was faster: its wheel is as good
                work.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return str(find_wheel(folder) or fail(f"The build left no wheel in {folder}."))


def listed_wheels(place: str) -> "dict[str, str]":
    """The wheels of a folder, or of a page of links: {file name: path or address}. A place may be one wheel, too."""
    if "://" not in place:
        path = Path(place).expanduser()
        if not path.exists():
            fail(f"CPPBATCH_WHEELS={place} does not exist; it must be a folder, or an https address.")
        return {each.name: str(each) for each in ([path] if path.is_file() else path.glob("*.whl"))}
    if not place.startswith("https://"):
        fail(f"CPPBATCH_WHEELS={place} is not secure; an address must begin with https://.")
    links = [place]
    if not urllib.parse.urlsplit(place).path.endswith(".whl"):
        try:
            with urllib.request.urlopen(place, timeout=30) as page:
                text = page.read().decode(errors="replace")
        except OSError as error:
            fail(f"CPPBATCH_WHEELS={place} cannot be read: {error}")
        found = re.findall(r"""href\s*=\s*["']([^"']+)""", text)
        links = [urllib.parse.urljoin(place, html.unescape(each)) for each in found]
    names = {link: Path(urllib.parse.unquote(urllib.parse.urlsplit(link).path)).name for link in links}
    return {name: link for link, name in names.items() if name.endswith(".whl") and link.startswith("https://")}


def runs_here(tag: str) -> bool:
    """Whether libraries for this platform run on this machine: linux_x86_64, manylinux_2_28_aarch64, win_amd64."""
    found = PLATFORM.fullmatch(tag)
    if not found or SYSTEMS[found[1]] != SYSTEM or found[4] not in (platform.machine().lower(), "universal2"):
        return False
    if not found[2]:
        return True
    release = platform.mac_ver()[0] if SYSTEM == "Darwin" else platform.libc_ver()[1]
    return (int(found[2]), int(found[3])) <= tuple(int(part) for part in re.findall(r"\d+", release)[:2])


def backend_of_wheel(name: str, version: str) -> str:
    """The backend of a wheel for this version and machine; "" for another file. scripts/build_wheel.py writes it into
    the name, and without it a wheel is the usual one of the platform."""
    found = WHEEL.fullmatch(name)
    if not found or found[1] != version or not found[3].startswith("py3"):
        return ""
    if not any(runs_here(tag) for tag in found[4].split(".")):
        return ""
    return found[2] or ("metal" if SYSTEM == "Darwin" and platform.machine() == "arm64" else "cpu")


def taken_wheel(place: str, version: str, backends: "list[str]") -> str:
    """The wheel of CPPBATCH_WHEELS for the first of these backends that has one."""
    wheels = listed_wheels(place)
    for backend in backends:
        fitting = [name for name in wheels if backend_of_wheel(name, version) == backend]
        if fitting:
            say(f"Taking {max(fitting)} from {place}")
            return wheels[max(fitting)]
    libc = " ".join(platform.libc_ver()) if SYSTEM == "Linux" else platform.mac_ver()[0]
    machine = " ".join(filter(None, (SYSTEM, platform.machine(), libc)))
    return fail(
        f"CPPBATCH_WHEELS={place} has no wheel of llama-cpp-python {version} for {' or '.join(backends)} on {machine}. "
        f"It has: {', '.join(sorted(wheels)) or 'no wheels'}. Unset CPPBATCH_WHEELS to build one for this machine."
    )


def plan_wheel(installed: str) -> "tuple[str, Callable[[], str] | None]":
    """The key of the wheel of llama-cpp-python that .venv needs, and what gets its path or address.

    `installed`: the key of the one in .venv. One that was taken stays there when CPPBATCH_WHEELS is not set again.
    """
    backend, remark = pick_backend()
    version, backends = pinned_version(), [backend]
    if not os.environ.get("CPPBATCH_BACKEND"):  # the wheel for the CPU runs beside every GPU
        gpu = ["cuda"] if nvidia_gpus() else ["vulkan"] if vulkan_gpus() and find_library("vulkan") else []
        backends = list(dict.fromkeys([*gpu, backend, "cpu"]))
    taken = f"{version} for {' or '.join(backends)} from "
    place = os.environ.get("CPPBATCH_WHEELS")
    if not place and installed.startswith(taken):
        return installed, None
    if not place:
        build = plan_build(backend)
        return build.key, functools.partial(built_wheel, build, remark)
    # The files of a folder are part of the key. A page is not read at each start: its wheels have different names.
    files = listed_wheels(place).values() if "://" not in place else ()
    stamps = [(each, os.stat(each).st_size, os.stat(each).st_mtime_ns) for each in sorted(files)]
    digest = hashlib.sha256(repr(stamps).encode()).hexdigest()[:12]
    return f"{taken}{place} {digest}", functools.partial(taken_wheel, place, version, backends)


def venv_works() -> bool:
    """False also for a .venv without pip, or with a Python that was replaced by an older or newer one."""
    test = f"import sys, pip; print(sys.version_info >= {OLDEST_PYTHON})"
    return output_of(str(PYTHON), "-c", test) == "True"


def run(*command: str) -> None:
    subprocess.run(command, stdin=subprocess.DEVNULL, check=True)


def make_venv() -> None:
    if not (importlib.util.find_spec("venv") and importlib.util.find_spec("ensurepip")):
        fail("This Python cannot make virtual environments. Debian/Ubuntu: sudo apt install python3-venv")
    say("Making .venv")
    if VENV.is_symlink():
        VENV.unlink()  # --clear would empty the folder that it links to, which may be another project's
    run(sys.executable, "-m", "venv", "--clear", str(VENV))


def stamp_text(key: str, names: "list[str]") -> str:
    """What an install depends on. A .venv survives neither a move nor another Python, so they count too."""
    pyproject = hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest()
    python = os.path.realpath(PYTHON)
    listed = " ".join(names) or "none"
    return f"folder {ROOT}\npython {python}\npyproject {pyproject}\nwheel {key}\nextras {listed}\n"


def install(names: "list[str]") -> None:
    """`names`: extras and dependency groups of pyproject.toml, beside those that the .venv has already."""
    have = STAMP.read_text("utf-8") if STAMP.exists() else ""
    installed = dict(re.findall(r"^(wheel|extras) (.*)$", have, re.MULTILINE))
    names = sorted({*names, *installed.get("extras", "").split()} - {"none"})
    key, get_wheel = plan_wheel(installed.get("wheel", ""))
    if have == stamp_text(key, names) and PYTHON.exists() and any(BIN.glob("cppbatch*")):
        return
    if not venv_works() or (have and f"folder {ROOT}\n" not in have):
        make_venv()
        have = ""
        key, get_wheel = plan_wheel("")
    wheel = get_wheel() if get_wheel and f"\nwheel {key}\n" not in have else None
    STAMP.unlink(missing_ok=True)  # a run that breaks off must not look finished
    say("Installing cppbatch and its dependencies")
    pip_install = [str(PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if "dev" in names:  # modules are compiled when they are imported: all of them take half of this install's time
        pip_install.append("--no-compile")
    if wheel:
        run(*pip_install, "--force-reinstall", "--no-deps", wheel)
    groups = [name for name in names if name in GROUPS]
    if groups:
        run(*pip_install, "pip>=25.1")  # the first with --group
    extras = ",".join([*EXTRAS, *(name for name in names if name not in GROUPS)])
    run(*pip_install, "-e", f"{ROOT}[{extras}]", *(f"--group={ROOT / 'pyproject.toml'}:{name}" for name in groups))
    STAMP.write_text(stamp_text(key, names), "utf-8")
    say(f"Ready: {(BIN / 'cppbatch').relative_to(ROOT)} serve")


def main() -> None:
    if sys.version_info < OLDEST_PYTHON:
        fail(f"cppbatch needs Python 3.10 or newer; {sys.executable} is {platform.python_version()}.")
    parser = argparse.ArgumentParser(description="Make .venv ready to run cppbatch.")
    parser.add_argument("--dev", action="store_true", help="with the tools that scripts/test runs")
    parser.add_argument("--browser", action="store_true", help="with Playwright, to test the web page")
    parser.add_argument("--ray", action="store_true", help="with Ray, for several machines (docs/ray.md)")
    wanted = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # clean up as for Ctrl-C
    try:
        install([name for name in ("dev", "browser", "ray") if getattr(wanted, name)])
    except KeyboardInterrupt:
        fail("\nInterrupted; run it again to continue.", 130)
    except subprocess.CalledProcessError as error:
        fail(f"Failed with exit code {error.returncode}: {shlex.join(error.cmd)}")
    except OSError as error:
        fail(f"Set-up failed: {error}")


if __name__ == "__main__":
    main()
