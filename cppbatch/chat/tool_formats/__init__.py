"""How models of one family call tools: the text they write, how it is parsed, and a grammar that enforces it."""
