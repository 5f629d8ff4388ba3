"""JSON schemas as they are used for generation: simplified, and with objects that have only the properties they name.

The grammar engine does not know all keywords, and many schemas use those only in ways that restrict nothing:
`"uniqueItems": false`, `"propertyNames": {"type": "string"}`. Such keywords are dropped, whatever the draft.

A schema that does not mention other properties allows any, and small models then write them until the text is cut off.
llama.cpp and vLLM exclude them too, and clients such as instructor rely on it. The result still matches the client's
schema. `"additionalProperties": true` allows others.

The grammar engine takes `oneOf` only if it sees that no value matches two alternatives. Where types, constants or
required properties tell, `anyOf` replaces it, and an alternative does not allow what would make another one match.
"""

from __future__ import annotations

from typing import Any

from cppbatch.generation_schema.close import close_objects
from cppbatch.generation_schema.simplify import simplify


def generation_schema(schema: Any) -> Any:
    """`close_objects` of what `simplify` returns."""
    return close_objects(simplify(schema))
