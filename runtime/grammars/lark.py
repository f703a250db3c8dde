"""Lark, in the dialect of llguidance, with JSON Schemas inside."""

from __future__ import annotations

import json
import re

from stem_edge.errors import InputError
from stem_edge.files.strict_json import one_line
from stem_edge.runtime.grammars.schema import OPTIONS, prepared

# Texts, regular expressions and comments first: what is in them is no schema.
_SCHEMA = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?!/)(?:\\.|[^/\\\n])+/|//[^\n]*|(?P<json>%json\s*)')


def with_prepared_schemas(lark: str) -> str:
    """Return a Lark grammar whose schemas, after %json, are prepared as a Grammar's own are.

    Raises InputError for one that is not JSON.
    """
    written, at = [], 0
    while found := _SCHEMA.search(lark, at):
        written.append(lark[at : found.end()])
        at = found.end()
        if found["json"] is not None:
            try:
                _, end = json.JSONDecoder().raw_decode(lark, at)
            except (ValueError, RecursionError) as error:
                raise InputError(f"lark: after %json is no JSON ({one_line(error)})") from None
            schema = json.loads(prepared(lark[at:end]))
            written.append(json.dumps(schema | {"x-guidance": OPTIONS}, ensure_ascii=False))
            at = end
    return "".join(written) + lark[at:]
