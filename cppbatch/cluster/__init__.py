"""Engines behind one asyncio interface, wherever they run."""
