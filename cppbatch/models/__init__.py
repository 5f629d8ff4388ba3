"""Finding, fetching and inspecting GGUF files. Loads no llama.cpp."""
