"""Batches of the server: records, store, data folder, running batches."""
