"""llama-cpp-python's class with batching: `cppbatch.Llama`, and `patch`, which replaces the original by it.

The only package other than `cppbatch/llama` that imports llama_cpp: its class is a subclass of that package's, and
returns results in the same format.
"""

from cppbatch.llama.library import check_library

check_library()  # raises errors with installation commands, before the modules here import llama-cpp-python
