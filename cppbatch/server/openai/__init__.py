"""OpenAI's API: completions, chat completions, models."""
