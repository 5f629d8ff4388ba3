"""llama-cpp-python's class over the batch: `cppbatch.Llama`, and `patch`, which puts it in the place of the original.

The only package beside `cppbatch/llama` that imports llama_cpp: its class is a subclass of that package's, and its
answers have that package's forms.
"""

from cppbatch.llama.library import check_library

check_library()  # its errors say how to install llama-cpp-python, which the modules here import
