"""Mutants that no test can tell from the module, because they do the same."""

from __future__ import annotations

# (file, text of the line, change) -> why it does the same.
EQUIVALENT: dict[tuple[str, str, str], str] = {
    (
        "stem_edge/token_index.py",
        "return index.astype(np.int32, copy=False)",
        "False -> True",
    ): "the same values; a copy costs memory only",
    (
        "runtime/text.py",
        'T = TypeVar("T")',
        "'T' changed",
    ): "the name of a type",
    (
        "runtime/text.py",
        'yield "".join(chr(code) for code in range(0x500, 0x110000, 509) if not 0xD800 <= code < 0xE000)',
        "Lt -> LtE",
    ): "none of the codes is at the edge",
    (
        "runtime/text.py",
        'yield "".join(chr(code) for code in range(0x500, 0x110000, 509) if not 0xD800 <= code < 0xE000)',
        "LtE -> Lt",
    ): "none of the codes is at the edge",
    (
        "runtime/text.py",
        'yield "".join(chr(code) for code in range(0x500, 0x110000, 509) if not 0xD800 <= code < 0xE000)',
        "55296 -> 55297",
    ): "none of the codes is at the edge",
    (
        "runtime/text.py",
        'yield "".join(chr(code) for code in range(0x500, 0x110000, 509) if not 0xD800 <= code < 0xE000)',
        "57344 -> 57345",
    ): "none of the codes is at the edge",
    (
        "stem_edge/disk.py",
        '_BINARY = getattr(os, "O_BINARY", 0)  # Windows translates line ends unless told otherwise',
        "'O_BINARY' changed",
    ): "only Windows has it",
    (
        "stem_edge/disk.py",
        '_CAREFUL = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0)',
        "0 -> 1",
    ): "only Windows lacks both",
    (
        "stem_edge/edit_file.py",
        """_PACKED = re.compile(rb'"[0-9A-Za-z+/]{64,}+={0,2}"')""",
        """b'"[0-9A-Za-z+/]{64,}+={0,2}"' changed""",
    ): "rows are then looked at like all else, which only takes longer",
    (
        "runtime/store.py",
        "jobs = list(zip(numbers.tolist(), sealed, strict=True))",
        "True -> False",
    ): "one was made as long as the other, two lines before",
    (
        "stem_edge/strict_json.py",
        "name, count = Counter(name for name, _ in pairs).most_common(1)[0]",
        "1 -> 2",
    ): "the first of two is the first",
    (
        "stem_edge/tokenizer_gate.py",
        'count = _KEY.subn(b"", memoryview(raw))[1]',
        "b'' changed",
    ): "the text that is made is thrown away",
    (
        "stem_edge/child.py",
        'target=pass_lines, args=(pipe, take), name="stem-edge-child", daemon=True',
        "'stem-edge-child' changed",
    ): "the name is for people",
}
