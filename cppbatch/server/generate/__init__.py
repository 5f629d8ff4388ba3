"""This project's own API: `/generate` for one prompt, `/generate/batch` for many."""
