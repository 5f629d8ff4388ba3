"""OpenAI's files API: upload, list, download, delete."""
