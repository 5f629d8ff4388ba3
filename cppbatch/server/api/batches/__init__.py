"""Files and batches, over HTTP and offline."""
