"""GBNF, the grammars of llama.cpp, which llguidance converts to Lark.

llguidance reads text by lexemes and takes the longest that fits; GBNF reads by characters. So a grammar may
allow fewer texts than in llama.cpp, but never others.
"""

from __future__ import annotations

import re

from stem_edge.errors import InputError
from stem_edge.files.strict_json import one_line

MAX_CHARS, MAX_RULES = 1 << 15, 1000  # a chain of as many rules takes some seconds
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)
# Texts and classes of characters, comments, and white space. Possessive, so that time grows with the
# length alone.
_PART = re.compile(
    r'(?P<text>"(?:\\.|[^"\\])*+")|(?P<chars>\[(?:\\.|[^\]\\])*+\])|(?:\#[^\n]*+|\s++)++', re.DOTALL
)
_RULE = re.compile(r"[\w-]++\s*+::=")
_SIGNS = {'"': '\\"', "\\": "\\\\", "]": "\\]", "[": "\\[", "\n": "\\n", "\r": "\\r", "\t": "\\t"}


def lark_of(gbnf: str) -> str:
    """Return a GBNF grammar as Lark. Raises InputError."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if len(gbnf) > MAX_CHARS:
        raise InputError(f"GBNF has {len(gbnf):,} characters; expected at most {MAX_CHARS:,}")
    if (rules := len(_RULE.findall(gbnf))) > MAX_RULES:
        raise InputError(f"GBNF has {rules:,} rules; expected at most {MAX_RULES:,}")
    try:
        return str(gbnf_to_lark(_PART.sub(_simpler, gbnf)))
    except Exception as error:  # of several kinds, without a base class
        reason = one_line(re.sub(r" at line \d+,.*", "", str(error), flags=re.DOTALL))
        raise InputError(f"gbnf: {reason}; correct the grammar") from None


def _simpler(part: re.Match[str]) -> str:
    """Write a part as the converter reads it: no comments, a line for each rule, plain characters."""
    if part["text"]:
        return _ESCAPE.sub(_char, part[0])
    if part["chars"]:  # where && and ~~ are signs of regular expressions
        return _ESCAPE.sub(_char, part[0]).replace("&", r"\x26").replace("~", r"\x7E")
    return "\n" if _RULE.match(part.string, part.end()) else " "


def _char(escape: re.Match[str]) -> str:
    digits = escape[1] or escape[2] or escape[3]
    if digits is None:
        return escape[0]
    code = int(digits, 16)
    if code > 0x10FFFF or 0xD800 <= code < 0xE000:
        raise InputError(f"GBNF: there is no character {digits}; expected one of Unicode")
    char = chr(code)
    return _SIGNS.get(char) or (char if char.isprintable() else f"\\x{code:02X}")
