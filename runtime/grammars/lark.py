"""Lark, in the dialect of llguidance, with JSON Schemas and names of special tokens inside."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from stem_edge.errors import InputError
from stem_edge.files.strict_json import one_line
from stem_edge.runtime.grammars.library import MAX_LARK
from stem_edge.runtime.grammars.schema import OPTIONS, prepared
from stem_edge.shown import shown

# Texts, regular expressions and comments first: what is in them is neither schema nor token. They are
# split as llguidance splits them, which refuses a text that is not closed in its line, and a regular
# expression that is not closed at all. Possessive, so that time grows with the length alone.
_PART = re.compile(
    r'"(?:\\.|[^"\\\n])*+"?|/(?!/)(?:\\.|[^/\\])++/?|(?://|\#)[^\n]*+'
    r"|(?P<json>%json\s*+)|(?P<token><[^<>\s\[\]]++>)"
)


def prepared_lark(lark: str, special_ids: Mapping[str, int]) -> str:
    """Return a Lark grammar with its schemas, after %json, prepared as a Grammar's own are.

    Special tokens, such as <|python_tag|>, are written by number. Raises InputError for a schema that
    is not JSON, and for a token that does not exist.
    """
    written, at, size = [], 0, 0
    while found := _PART.search(lark, at):
        written.append(lark[at : found.start()])
        size += found.end() - at
        at = found.end()
        _check_size(size)
        if found["token"] is not None:
            written.append(f"<[{_id_of(found['token'], special_ids)}]>")
            continue
        written.append(found[0])
        if found["json"] is not None:
            try:
                given, end = json.JSONDecoder().raw_decode(lark, at)
            except (ValueError, RecursionError) as error:
                raise InputError(f"lark: after %json is no JSON ({one_line(error)})") from None
            # In Lark, a schema may say which spaces it has; never that its rules are not kept.
            told = given.pop("x-guidance", None) if isinstance(given, dict) else None
            options = {**(told if isinstance(told, dict) else OPTIONS), "lenient": False}
            schema = json.loads(prepared(json.dumps(given)))
            made = json.dumps(schema | {"x-guidance": options}, ensure_ascii=False)
            # With as many lines as before, so that errors name lines of what was given.
            written.append("\n" * lark.count("\n", at, end) + made)
            at = end
    _check_size(size + len(lark) - at)
    return "".join(written) + lark[at:]


def _check_size(size: int) -> None:
    if size > MAX_LARK:
        raise InputError(
            f"the grammar has more than {MAX_LARK:,} characters, as Lark and without schemas; "
            "write a shorter one"
        )


def _id_of(name: str, special_ids: Mapping[str, int]) -> int:
    if name not in special_ids:
        known = ", ".join(list(special_ids)[:8])
        raise InputError(f"the grammar names {shown(name)}; special tokens are {known}, ...")
    return special_ids[name]
