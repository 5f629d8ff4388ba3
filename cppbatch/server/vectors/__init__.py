"""Vectors of texts (OpenAI's embeddings) and how well documents answer a query (Jina's and Cohere's rerank)."""
