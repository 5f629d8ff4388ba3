"""OpenAI's routes for the OpenAPI document."""

from __future__ import annotations

from cppbatch.server.endpoint import asking, generating
from cppbatch.server.openai.schemas import ChatRequest, CompletionRequest
from cppbatch.server.openai.shapes import ChatAnswer, CompletionAnswer
from cppbatch.server.shapes import Model, ModelList

ENDPOINTS = {
    ("get", "/v1/models"): asking("The loaded model, as a list", ModelList),
    ("get", "/v1/models/{id}"): asking("The loaded model by its id", Model, (401, 404, 503)),
    ("post", "/v1/completions"): generating("Continues one or more prompts", CompletionRequest, CompletionAnswer),
    ("post", "/v1/chat/completions"): generating(
        "Continues a conversation with the assistant's next message", ChatRequest, ChatAnswer
    ),
}
