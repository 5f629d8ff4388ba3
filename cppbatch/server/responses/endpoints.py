"""The route of OpenAI's responses, for the OpenAPI document."""

from __future__ import annotations

from cppbatch.server.endpoint import generation_endpoint
from cppbatch.server.responses.schemas import ResponsesRequest
from cppbatch.server.responses.shapes import ResponseAnswer

ENDPOINTS = {
    ("post", "/v1/responses"): generation_endpoint(
        "Continues a conversation with the assistant's next message, as a response", ResponsesRequest, ResponseAnswer
    ),
}
