"""The command line: reads flags, calls the other packages, prints. It contains no logic of its own."""

from cppbatch.cli.quiet_imports import QuietImports

with QuietImports():
    from cppbatch.cli.main import main

__all__ = ["main"]
