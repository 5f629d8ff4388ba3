"""The command line. No logic of its own: it reads flags, calls the layers below, and prints."""

from cppbatch.cli.main import main

__all__ = ["main"]
