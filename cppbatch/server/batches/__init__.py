"""Batch jobs, and the files they are made of, over OpenAI's API."""
