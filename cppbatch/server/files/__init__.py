"""OpenAI's files: uploaded, listed, downloaded, deleted."""
