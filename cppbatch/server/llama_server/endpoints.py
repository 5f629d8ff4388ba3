"""llama-server's routes for the OpenAPI document."""

from __future__ import annotations

from cppbatch.server.endpoint import (
    QUERY_ERRORS,
    Endpoint,
    generation_endpoint,
    json_content,
    query_endpoint,
    schema_ref,
)
from cppbatch.server.llama_server.schemas import (
    DetokenizeRequest,
    InfillRequest,
    LlamaCompletionRequest,
    LlamaFields,
    TokenizeRequest,
)
from cppbatch.server.llama_server.shapes import (
    DetokenizeAnswer,
    LlamaAnswer,
    LoraAdapter,
    Props,
    Slot,
    TemplateAnswer,
    TokenizeAnswer,
)
from cppbatch.server.openai.chat_types import ChatCompletionRequest, ChatCompletionResponse
from cppbatch.server.openai.models_endpoint import ModelList

_FEW_FIELDS = {"type": "object", "description": "With `response_fields`: those alone"}
_ONE = {"anyOf": [schema_ref(LlamaAnswer), _FEW_FIELDS]}
_COMPLETION = {"anyOf": [*_ONE["anyOf"], {"type": "array", "description": "Of several texts", "items": _ONE}]}


def _completing(summary: str, body: type[LlamaFields]) -> Endpoint:
    endpoint = generation_endpoint(summary, body, LlamaAnswer)
    return endpoint._replace(content=endpoint.content | json_content(_COMPLETION))


ENDPOINTS = {
    ("post", "/completion"): _completing("Continues one or more prompts, as llama-server does", LlamaCompletionRequest),
    ("post", "/completions"): _completing("The same", LlamaCompletionRequest),
    ("post", "/infill"): _completing("Finds what stands between two texts", InfillRequest),
    ("post", "/tokenize"): generation_endpoint("A text's tokens", TokenizeRequest, TokenizeAnswer, streams=False),
    ("post", "/detokenize"): generation_endpoint(
        "The text of tokens", DetokenizeRequest, DetokenizeAnswer, streams=False
    ),
    ("post", "/apply-template"): generation_endpoint(
        "The prompt of a conversation, not continued", ChatCompletionRequest, TemplateAnswer, streams=False
    ),
    ("get", "/props"): query_endpoint("What is loaded, and the defaults", Props),
    ("get", "/slots"): Endpoint(
        "Which of the sequences that can run at once do",
        json_content({"type": "array", "items": schema_ref(Slot)}),
        QUERY_ERRORS,
        types=(Slot,),
    ),
    ("get", "/lora-adapters"): Endpoint(
        "The adapters that a request's `lora` can name",
        json_content({"type": "array", "items": schema_ref(LoraAdapter)}),
        QUERY_ERRORS,
        types=(LoraAdapter,),
    ),
    ("get", "/models"): query_endpoint("As /v1/models", ModelList),
    ("post", "/chat/completions"): generation_endpoint(
        "As /v1/chat/completions", ChatCompletionRequest, ChatCompletionResponse
    ),
}
