"""Tool-call formats of model families: the text of a call, its parser, and a grammar that enforces it."""
