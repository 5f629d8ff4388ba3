"""Input files of jobs: their format, JSON lines, tables."""
