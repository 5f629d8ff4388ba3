"""What an engine will take of a machine's memory, found out without loading the model.

`survey` asks a child process, in which llama.cpp only simulates its allocations; `plan` holds that against what is
free; `check` refuses what will not fit; `measure` loads the model and looks.
"""
