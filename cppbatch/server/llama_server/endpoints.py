"""llama-server's routes for the OpenAPI document."""

from __future__ import annotations

from cppbatch.cluster.engine_client import Health
from cppbatch.server.endpoint import ASKING, Endpoint, asking, generating, json, ref
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
from cppbatch.server.openai.schemas import ChatRequest
from cppbatch.server.openai.shapes import ChatAnswer
from cppbatch.server.shapes import ModelList

_FEW_FIELDS = {"type": "object", "description": "With `response_fields`: those alone"}
_ONE = {"anyOf": [ref(LlamaAnswer), _FEW_FIELDS]}
_COMPLETION = {"anyOf": [*_ONE["anyOf"], {"type": "array", "description": "Of several texts", "items": _ONE}]}


def _completing(summary: str, body: type[LlamaFields]) -> Endpoint:
    endpoint = generating(summary, body, LlamaAnswer)
    return endpoint._replace(answer=endpoint.answer | json(_COMPLETION))


ENDPOINTS = {
    ("post", "/completion"): _completing("Continues one or more prompts, as llama-server does", LlamaCompletionRequest),
    ("post", "/completions"): _completing("The same", LlamaCompletionRequest),
    ("post", "/infill"): _completing("Finds what stands between two texts", InfillRequest),
    ("post", "/tokenize"): generating("A text's tokens", TokenizeRequest, TokenizeAnswer, streams=False),
    ("post", "/detokenize"): generating("The text of tokens", DetokenizeRequest, DetokenizeAnswer, streams=False),
    ("post", "/apply-template"): generating(
        "The prompt of a conversation, not continued", ChatRequest, TemplateAnswer, streams=False
    ),
    ("get", "/props"): asking("What is loaded, and the defaults", Props),
    ("get", "/slots"): Endpoint(
        "Which of the sequences that can run at once do", json({"type": "array", "items": ref(Slot)}), ASKING,
        types=(Slot,),
    ),
    ("get", "/lora-adapters"): Endpoint(
        "The adapters that a request's `lora` can name", json({"type": "array", "items": ref(LoraAdapter)}), ASKING,
        types=(LoraAdapter,),
    ),
    ("get", "/models"): asking("As /v1/models", ModelList),
    ("post", "/chat/completions"): generating("As /v1/chat/completions", ChatRequest, ChatAnswer),
    ("get", "/v1/health"): Endpoint("As /health", json(ref(Health)), (503,), unavailable=Health),
}  # fmt: skip
