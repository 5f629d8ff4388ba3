"""Batch jobs: OpenAI's batches API, and `cppbatch batch` without a server."""
