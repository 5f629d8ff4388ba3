"""Engines behind one asyncio interface: on a thread, in a worker process, in several worker processes."""
