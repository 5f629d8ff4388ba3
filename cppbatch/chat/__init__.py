"""Conversations: to prompts by the model's template, and back from its text to messages, thoughts and tool calls."""
