"""Fields of request bodies that the API families share: reading, sampling, structured output."""
