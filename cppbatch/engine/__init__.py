"""The engine: requests in, batches through llama.cpp, events out. No ctypes, no HTTP, no asyncio."""
