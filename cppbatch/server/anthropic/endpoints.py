"""Anthropic's routes for the OpenAPI document."""

from __future__ import annotations

from cppbatch.server.anthropic.schemas import CountTokensRequest, MessagesRequest
from cppbatch.server.anthropic.shapes import MessageAnswer, TokenCount
from cppbatch.server.api_errors import AnthropicErrorResponse
from cppbatch.server.endpoint import generation_endpoint

ENDPOINTS = {
    ("post", "/v1/messages"): generation_endpoint(
        "Continues a conversation with the assistant's next message, in Anthropic's API", MessagesRequest, MessageAnswer
    )._replace(error=AnthropicErrorResponse, unavailable=AnthropicErrorResponse),
    ("post", "/v1/messages/count_tokens"): generation_endpoint(
        "How many tokens the prompt of such a conversation has", CountTokensRequest, TokenCount, streams=False
    )._replace(error=AnthropicErrorResponse, unavailable=AnthropicErrorResponse),
}
