"""Conversations as a model's chat template writes them. No HTTP, no asyncio, no llama.cpp."""
