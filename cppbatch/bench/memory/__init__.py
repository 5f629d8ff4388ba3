"""Estimating an engine's memory without loading the model.

`memory_estimate` asks a child process, in which llama.cpp simulates its allocations. `memory_demand` compares the
estimate with free memory, `memory_check` refuses settings that do not fit, and `measure_memory` loads the model and
measures.
"""
