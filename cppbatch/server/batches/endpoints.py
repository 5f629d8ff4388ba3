"""The routes of batches, for the OpenAPI document."""

from __future__ import annotations

from cppbatch.jobs.batch_records import Batch
from cppbatch.server.batches.schemas import BatchQuery, NewBatch
from cppbatch.server.batches.shapes import BatchList
from cppbatch.server.endpoint import Endpoint, asking, json, ref

_WRITING = (401, 413, 429, 503, 507)

ENDPOINTS = {
    ("post", "/v1/batches"): Endpoint(
        "Has every line of a file answered", json(ref(Batch)), (400, *_WRITING), NewBatch, types=(Batch,)
    ),
    ("get", "/v1/batches"): asking("The batches, the newest first", BatchList, (400, 401, 503), query=BatchQuery),
    ("get", "/v1/batches/{id}"): asking("A batch as it is now", Batch, (401, 404, 503)),
    ("post", "/v1/batches/{id}/cancel"): asking(
        "Ends a batch; what is answered already stays. 409 if it has ended", Batch, (404, 409, *_WRITING)
    ),
}
