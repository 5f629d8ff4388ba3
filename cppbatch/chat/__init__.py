"""Chat templates, tool calls and reasoning: a conversation becomes a prompt, and generated text becomes a message."""
