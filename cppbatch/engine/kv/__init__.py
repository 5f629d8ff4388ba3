"""Accounting of KV cells: the pool, cached prefixes, layout, checkpoints."""
