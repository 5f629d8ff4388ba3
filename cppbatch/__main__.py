"""`python -m cppbatch`."""

from cppbatch.cli import main

main()
