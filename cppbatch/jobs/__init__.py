"""Durable batch jobs: a file of requests in, a file of results out, resumable at any moment. No HTTP, no engine."""
