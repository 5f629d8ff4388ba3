"""The routes of files, for the OpenAPI document."""

from __future__ import annotations

from typing import get_args

from cppbatch.jobs.batch_records import File
from cppbatch.server.endpoint import Endpoint, json_content, query_endpoint, schema_ref
from cppbatch.server.files.schemas import FileQuery, UploadPurpose
from cppbatch.server.files.shapes import FileDeleted, FileList

_BYTES = {"type": "string", "format": "binary"}
_UPLOAD = {
    "type": "object",
    "properties": {
        "file": _BYTES,
        "purpose": {"type": "string", "enum": list(get_args(UploadPurpose))},
        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
        "expires_after[seconds]": {"type": "integer", "minimum": 3600, "maximum": 2592000},
    },
    "required": ["file", "purpose"],
}

ENDPOINTS = {
    ("post", "/v1/files"): Endpoint(
        "Keeps a file", json_content(schema_ref(File)), (400, 401, 413, 429, 503, 507), types=(File,), form=_UPLOAD
    ),
    ("get", "/v1/files"): query_endpoint("The files that are kept", FileList, (400, 401, 503), query=FileQuery),
    ("get", "/v1/files/{id}"): query_endpoint("A file by its id, without its contents", File, (401, 404, 503)),
    ("get", "/v1/files/{id}/content"): Endpoint(
        "A file's contents",
        {"application/octet-stream": _BYTES, "application/jsonl": _BYTES},
        (401, 404, 503),
    ),
    ("delete", "/v1/files/{id}"): query_endpoint(
        "Forgets a file, unless a batch needs it", FileDeleted, (401, 404, 409, 429, 503, 507)
    ),
}
