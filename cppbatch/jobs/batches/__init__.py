"""Batches of the server: records, the store, the data folder, the batch that runs."""
