"""The grammars that a request must match: compiled, checked in a child process, and as masks of tokens."""
