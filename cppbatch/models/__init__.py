"""Finding, downloading, inspecting and writing GGUF files. Does not load llama.cpp."""
