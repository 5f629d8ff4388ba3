"""llama-server's own tests, run against cppbatch: `python -m tests.llama_server`, described in docs/llama-server.md."""
