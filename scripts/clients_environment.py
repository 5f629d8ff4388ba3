"""Installs what a requirements file lists, once on this machine, and prints the path of its Python; for a package.json,
the folder with its commands.

Usage: python3 scripts/clients_environment.py tests/clients/requirements.txt

`./scripts/test clients` installs the clients there, because some of them require other versions of packages than
.venv has. The folder is in the user's cache. A hash of the file's text and of this Python names it, so new pins make a
new environment. Lines of a requirements file say what is different in its environment:

# beside .venv          it sees the packages of this checkout's .venv too, behind its own: pip takes them as installed,
                        and changes none of them
# Python 3.13           its Python is the `python3.13` in PATH
# without dependencies  the file lists all packages, and pip installs no others
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().resolve() / "cppbatch" / "clients"


def environment(requirements: Path) -> Path:
    """The Python of the environment. An installation that broke off is begun again.

    Raises subprocess.CalledProcessError if pip cannot install the requirements.
    """
    text = requirements.read_text("utf-8")
    beside = packages_of_venv() if "\n# beside .venv" in text else None
    version = re.search(r"^# Python (3\.\d+)$", text, re.MULTILINE)
    python = f"python{version[1]}" if version else sys.executable
    options = ["--no-deps"] if "\n# without dependencies" in text else []

    def install(folder: Path) -> None:
        subprocess.run([python, "-m", "venv", "--clear", folder], check=True, stdout=sys.stderr)
        if beside:
            (packages,) = folder.glob("lib/python*/site-packages")
            (packages / "beside.pth").write_text(f"{beside}\n", "utf-8")
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *options, "-r", str(requirements)], check=True, stdout=sys.stderr)

    return _installed(requirements, text + (f"\n{beside}" if beside else ""), install) / "bin" / "python"


def node_commands(package: Path) -> Path:
    """The folder with the commands of npm's packages. As `environment`, with npm."""

    def install(folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "package.json").write_bytes(package.read_bytes())
        npm = ["npm", "install", "--no-audit", "--no-fund", "--loglevel", "error"]
        subprocess.run(npm, cwd=folder, check=True, stdout=sys.stderr)

    return _installed(package, package.read_text("utf-8"), install) / "node_modules" / ".bin"


def _installed(listed: Path, text: str, install: Callable[[Path], None]) -> Path:
    """The folder that `install` has filled for this text, now or earlier."""
    text = f"{os.path.realpath(sys.executable)}\n{sys.version}\n{text}"
    folder = cache_folder() / hashlib.sha256(text.encode()).hexdigest()[:16]
    complete = folder / "complete"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not complete.exists():
            print(f"Installing {listed} into {folder}: some minutes, once on this machine", file=sys.stderr)
            install(folder)
            complete.write_text(str(listed), "utf-8")
    return folder


def packages_of_venv() -> Path:
    """The packages of this checkout's .venv."""
    (packages,) = (Path(__file__).resolve().parents[1] / ".venv").glob("lib/python*/site-packages")
    return packages.resolve()


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("Usage: python3 scripts/clients_environment.py REQUIREMENTS.txt or package.json")
    listed = Path(sys.argv[1])
    try:
        print(node_commands(listed) if listed.suffix == ".json" else environment(listed))
    except FileNotFoundError as error:
        sys.exit(f"{listed} cannot be installed: {error}")
    except subprocess.CalledProcessError as error:
        version = sys.version.split()[0]
        sys.exit(f"{listed} cannot be installed for Python {version} (the message is above): {error}")


if __name__ == "__main__":
    main()
