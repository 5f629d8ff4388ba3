"""llama-server's paths for endpoints with other paths in OpenAI's API."""

from __future__ import annotations

from cppbatch.server.api import input_tokens, pooling
from cppbatch.server.api.openai import chat_completions, models_endpoint
from cppbatch.server.api.responses import create_response
from cppbatch.server.http.endpoint import Routes

routes = Routes()
routes.alias("/models", models_endpoint.routes, "/v1/models")
routes.alias("/chat/completions", chat_completions.routes, "/v1/chat/completions")
routes.alias("/chat/completions/input_tokens", input_tokens.routes, "/v1/chat/completions/input_tokens")
routes.alias("/responses", create_response.routes, "/v1/responses")
routes.alias("/responses/input_tokens", input_tokens.routes, "/v1/responses/input_tokens")
for path in ("/rerank", "/reranking", "/v1/reranking"):
    routes.alias(path, pooling.routes, "/v1/rerank")
