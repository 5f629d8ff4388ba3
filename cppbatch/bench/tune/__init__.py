"""`cppbatch tune`: finds the best settings for a model on this machine.

`tuner` varies the settings, `measurement` measures each in a child process, and `search` chooses among the results.
"""
