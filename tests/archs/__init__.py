"""The promises of the engine, checked on a tiny random model of every architecture that llama.cpp runs."""
