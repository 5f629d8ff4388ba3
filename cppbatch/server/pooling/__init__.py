"""Endpoints of pooling models: embeddings (OpenAI's API) and rerank (Jina's and Cohere's API)."""
