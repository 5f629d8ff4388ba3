"""Finds the settings for a model on this machine: `search` has the rules, `points` measures, `tuner` goes round."""
