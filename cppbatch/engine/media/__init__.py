"""Images and audio of requests: files, sources, rows of vectors."""
