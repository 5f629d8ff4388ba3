"""OpenAI's responses: `/v1/responses`."""
