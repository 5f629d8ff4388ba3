"""Makes the virtual environment of a requirements file, once on this machine, and prints the path of its Python.

Usage: python3 scripts/clients_environment.py tests/clients/requirements.txt

`./scripts/test clients` installs the clients there, because some of them require other versions of packages than
.venv has. The folder is in the user's cache. A hash of the file's text and of this Python names it, so new pins make a
new environment. A file with the line "# beside .venv" gets an environment that sees the packages of this checkout's
.venv too, behind its own: pip takes them as installed, and changes none of them.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
from pathlib import Path


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().resolve() / "cppbatch" / "clients"


def environment(requirements: Path) -> Path:
    """The Python of the environment. An installation that broke off is begun again.

    Raises subprocess.CalledProcessError if pip cannot install the requirements.
    """
    text = f"{os.path.realpath(sys.executable)}\n{sys.version}\n{requirements.read_text('utf-8')}"
    beside = packages_of_venv() if "\n# beside .venv" in text else None
    text += f"\n{beside}" if beside else ""
    folder = cache_folder() / hashlib.sha256(text.encode()).hexdigest()[:16]
    python, complete = folder / "bin" / "python", folder / "complete"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not complete.exists():
            print(f"Installing {requirements} into {folder}: some minutes, once on this machine", file=sys.stderr)
            subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True, stdout=sys.stderr)
            if beside:
                (packages,) = folder.glob("lib/python*/site-packages")
                (packages / "beside.pth").write_text(f"{beside}\n", "utf-8")
            pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            subprocess.run([*pip, "-r", str(requirements)], check=True, stdout=sys.stderr)
            complete.write_text(str(requirements), "utf-8")
    return python


def packages_of_venv() -> Path:
    """The packages of this checkout's .venv."""
    (packages,) = (Path(__file__).resolve().parents[1] / ".venv").glob("lib/python*/site-packages")
    return packages.resolve()


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("Usage: python3 scripts/clients_environment.py REQUIREMENTS.txt")
    try:
        print(environment(Path(sys.argv[1])))
    except subprocess.CalledProcessError as error:
        version = sys.version.split()[0]
        sys.exit(f"{sys.argv[1]} cannot be installed for Python {version} (pip's message is above): {error}")


if __name__ == "__main__":
    main()
