"""Speculative decoding: tokens are drafted cheaply, and verified in the step that would compute one token."""
