"""`cppbatch bench serve`: puts load on OpenAI-compatible servers and measures latencies and throughput."""
