"""`cppbatch tune`: finds the best settings for a model on this machine.

`tuner` varies the settings and chooses among the results, `measurement` measures each in a child process.
"""
