"""OpenAI's API: completions, chat, embeddings, responses, models."""
