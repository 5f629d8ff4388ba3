"""The API families: request types, handlers and response types."""
