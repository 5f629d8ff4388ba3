"""Chat templates, tool calls and reasoning: converts conversations to prompts, and generated text to messages."""
