"""Mutants that no test can tell from the module, because they do the same."""

from __future__ import annotations

# (file, text of the line, change) -> why it does the same.
EQUIVALENT: dict[tuple[str, str, str], str] = {
    (
        "stem_edge/token_index.py",
        "return index.astype(np.int32, copy=False)",
        "False -> True",
    ): "the same values; a copy costs memory only",
}
