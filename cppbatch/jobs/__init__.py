"""Durable batch jobs: a file of prompts in, a file of answers out, nothing lost and nothing twice. No HTTP."""
