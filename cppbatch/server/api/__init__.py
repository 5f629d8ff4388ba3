"""The API families: request types, handlers, response types."""
