"""The routes of this project's own API for the OpenAPI document."""

from __future__ import annotations

from cppbatch.server.endpoint import generation_endpoint
from cppbatch.server.generate.schemas import BatchRequest, GenerateRequest
from cppbatch.server.generate.shapes import BatchAnswer, GenerateAnswer

ENDPOINTS = {
    ("post", "/generate"): generation_endpoint("Continues a prompt", GenerateRequest, GenerateAnswer),
    ("post", "/generate/batch"): generation_endpoint(
        "Continues many prompts, or one in many ways; one that fails does not harm the others",
        BatchRequest,
        BatchAnswer,
    ),
}
