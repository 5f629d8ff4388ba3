"""Determines an engine's settings before it starts: memory, sizes that fit, the saved profile, measured attention.

`estimate` runs a child process in which llama.cpp simulates its allocations. `demand` compares the estimate with free
memory, and `sizes` chooses settings that fit and refuses others.
"""
