"""This project's own API: a prompt, or many at once."""
