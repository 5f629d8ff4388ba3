"""What an engine takes and gets before it starts: memory, sizes that fit, the saved profile, measured attention.

`estimate` asks a child process, in which llama.cpp simulates its allocations. `demand` compares the estimate with free
memory, and `sizes` chooses settings that fit and refuses others.
"""
