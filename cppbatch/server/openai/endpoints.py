"""OpenAI's routes for the OpenAPI document."""

from __future__ import annotations

from cppbatch.server.endpoint import generation_endpoint, query_endpoint
from cppbatch.server.openai.schemas import ChatRequest, CompletionRequest
from cppbatch.server.openai.shapes import ChatAnswer, CompletionAnswer
from cppbatch.server.shapes import Model, ModelList

ENDPOINTS = {
    ("get", "/v1/models"): query_endpoint("The loaded model, as a list", ModelList),
    ("get", "/v1/models/{id}"): query_endpoint("The loaded model by its id", Model, (401, 404, 503)),
    ("post", "/v1/completions"): generation_endpoint(
        "Continues one or more prompts", CompletionRequest, CompletionAnswer
    ),
    ("post", "/v1/chat/completions"): generation_endpoint(
        "Continues a conversation with the assistant's next message", ChatRequest, ChatAnswer
    ),
}
