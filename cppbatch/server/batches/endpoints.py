"""The routes of batches, for the OpenAPI document."""

from __future__ import annotations

from cppbatch.jobs.batch_records import Batch
from cppbatch.server.batches.schemas import BatchQuery, NewBatch
from cppbatch.server.batches.shapes import BatchList
from cppbatch.server.endpoint import Endpoint, json_content, query_endpoint, schema_ref

_WRITING = (401, 413, 429, 503, 507)

ENDPOINTS = {
    ("post", "/v1/batches"): Endpoint(
        "Has every line of a file answered", json_content(schema_ref(Batch)), (400, *_WRITING), NewBatch, types=(Batch,)
    ),
    ("get", "/v1/batches"): query_endpoint(
        "The batches, the newest first", BatchList, (400, 401, 503), query=BatchQuery
    ),
    ("get", "/v1/batches/{id}"): query_endpoint("A batch as it is now", Batch, (401, 404, 503)),
    ("post", "/v1/batches/{id}/cancel"): query_endpoint(
        "Ends a batch; what is answered already stays. 409 if it has ended", Batch, (404, 409, *_WRITING)
    ),
}
