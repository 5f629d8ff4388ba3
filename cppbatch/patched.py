"""Runs a program whose `llama_cpp.Llama` is `cppbatch.Llama`.

python -m cppbatch.patched program.py --its --arguments
python -m cppbatch.patched -m package.module --its --arguments
"""

from __future__ import annotations

import os
import runpy
import sys

from cppbatch.llama_cpp_python.patching import patch

_USAGE = "Usage: python -m cppbatch.patched PROGRAM.py [ARGUMENTS...]   or   -m MODULE [ARGUMENTS...]"


def main() -> None:
    """Runs the program given on the command line."""
    arguments = sys.argv[1:]
    is_module = arguments[:1] == ["-m"]
    arguments = arguments[is_module:]
    if not arguments or arguments[0] in ("-h", "--help"):
        sys.exit(_USAGE)
    patch()
    sys.argv = arguments
    if is_module:
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        return
    sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
    runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main()
