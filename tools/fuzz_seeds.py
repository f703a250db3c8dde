"""Write the seeds of the fuzzers, tests/data/fuzz/TARGET, from small exports.

    python tools/fuzz_seeds.py [TARGET...]

Needed when a format changed; inputs named `finding-...` are kept. Weights are zeros in the seeds,
because no check looks at them.
"""

from __future__ import annotations

import argparse
import json
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from fuzz_mutators import join
from fuzz_targets import SEEDS
from make_checkpoint import Shape, write_checkpoint

import stem_edge
from stem_edge.edit_file import Edit, NewRows, Replacement, encode_edit
from stem_edge.rows import RecordLayout
from stem_edge.shards import ShardGrid, array_metadata
from stem_edge.table_store import RECORDS, TableFormat, group_metadata
from stem_edge.token_index import encode_index, index_metadata
from stem_edge.zarr_json import encode_metadata

FINDING = "finding-"
MAX_SEED_NBYTES = 1 << 15


def exported(folder: Path) -> Iterator[tuple[str, str, bytes]]:
    """Target, name and bytes of seeds that small exports have."""
    shape = Shape(
        dim=32, n_layers=2, n_heads=1, n_kv_heads=1, d_ff=32, stem_layers=(1,), tied_head=True
    )
    checkpoint = write_checkpoint(folder / "checkpoint", shape)
    onnx, gguf = folder / "onnx", folder / "gguf"
    stem_edge.export_bundle(checkpoint, onnx, backbone="int4", tables="int4")
    stem_edge.export_bundle(checkpoint, gguf, engine="gguf", backbone="q4_0", tables="fp32")
    for name, bundle in (("onnx", onnx), ("gguf", gguf)):
        yield "manifest", f"{name}.json", (bundle / "manifest.json").read_bytes()


def stores() -> Iterator[tuple[str, str, bytes]]:
    """A table store without and one with rare records and an index."""
    layout = RecordLayout(records=5, layers=(0, 2), parts=((16,),), row_type="int8", group_size=16)
    rare = RecordLayout(records=2, layers=(0, 2), parts=((16,),), row_type="int4", group_size=16)
    plain = TableFormat(tokens=5, tables=layout)
    mixed = TableFormat(tokens=4, tables=layout, rare_tables=rare, indexed=True)
    for name, format in (("plain", plain), ("mixed", mixed)):
        files = {"zarr.json": encode_metadata(group_metadata(format))}
        for folder, of_array in format.arrays().items():
            files |= _array(folder, of_array)
        if format.indexed:
            files["index/zarr.json"] = encode_metadata(index_metadata(format.tokens))
            files["index/c/0"] = encode_index(np.array([4, 0, 3, 1], np.int32))
        yield "store", f"{name}.store", join(files)
        for path in [path for path in files if path.endswith(".json")]:
            yield "zarr", f"{name}-{path.replace('/', '-')}", files[path]


def _array(folder: str, layout: RecordLayout) -> dict[str, bytes]:
    per_shard = 3 if folder == RECORDS else 2
    grid = ShardGrid(root=Path(folder), layout=layout, records_per_shard=per_shard)
    files = {f"{folder}/zarr.json": encode_metadata(array_metadata(layout, per_shard))}
    records = np.full((layout.records, layout.record_nbytes), 1, np.uint8)
    for shard in range(grid.shards):
        piece = records[: grid.shard_records(shard)]
        files[f"{folder}/c/{shard}/0"] = grid.seal(piece) + grid.index_bytes(shard)
    return files


def edits() -> Iterator[tuple[str, str, bytes]]:
    """An edit of each kind."""
    made_for = "0f" * 32
    changes = {
        "replacement": Edit(
            made_for=made_for, layers=(1, 2), change=Replacement(source="Spain", target="Germany")
        ),
        "subset": Edit(
            made_for=made_for,
            layers=(1,),
            scope="everywhere",
            change=Replacement(source="a", target="b", scheme="subset", subset=(0, 2), pad=3),
        ),
        "rows": Edit(
            made_for=made_for,
            layers=(1, 2),
            scope="everywhere",
            change=NewRows(rows={7: (b"\1" * 8, b"\2" * 8), 9: (b"", b"\3")}),
        ),
    }
    for name, edit in changes.items():
        yield "edit", f"{name}.edit", encode_edit(edit)


def checkpoints() -> Iterator[tuple[str, str, bytes]]:
    """A safetensors file of two tensors."""
    tensors = {
        "__metadata__": {"format": "pt"},
        "a.weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
    }
    header = json.dumps(tensors).encode()
    yield "safetensors", "two.safetensors", struct.pack("<Q", len(header)) + header + bytes(32)


def tokenizers() -> Iterator[tuple[str, str, bytes]]:
    """One of each kind of model, with steps of many kinds."""
    special = {
        "id": 5, "content": "<s>", "single_word": False, "lstrip": False, "rstrip": False,
        "normalized": False, "special": True,
    }  # fmt: skip
    shared = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [special]}
    template = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [5], "tokens": ["<s>"]}},
    }  # fmt: skip
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    split = {
        "type": "Split",
        "pattern": {"Regex": "\\d{1,3}|\\s+"},
        "behavior": "Isolated",
        "invert": False,
    }
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    bpe = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
        "vocab": {"a": 0, "b": 1, "c": 2, "ab": 3, "abc": 4}, "merges": [["a", "b"], ["ab", "c"]],
    }  # fmt: skip
    unigram = {
        "type": "Unigram", "unk_id": 0, "byte_fallback": False,
        "vocab": [["<unk>", 0.0], ["a", -1.5], ["b", -2.0], ["ab", -2.5], ["\u2581", -3.0], ["<s>", 0.0]],
    }  # fmt: skip
    wordpiece = {
        "type": "WordPiece", "unk_token": "<s>", "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 100, "vocab": {"a": 0, "##b": 1, "c": 2, "[UNK]": 3, "<s>": 5},
    }  # fmt: skip
    steps = {
        "bpe": (bpe, {"type": "NFC"}, {"type": "Sequence", "pretokenizers": [split, byte_level]},
                template, {"type": "ByteLevel"}),
        "unigram": (unigram, {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "\u2581"}, replace]},
                    {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True},
                    None, {"type": "Sequence", "decoders": [replace, {"type": "ByteFallback"}, {"type": "Fuse"},
                           {"type": "Strip", "content": " ", "start": 1, "stop": 0}]}),
        "wordpiece": (wordpiece, {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True,
                      "strip_accents": None, "lowercase": True}, {"type": "BertPreTokenizer"}, None,
                      {"type": "WordPiece", "prefix": "##", "cleanup": True}),
    }  # fmt: skip
    for name, (model, normalizer, pre, post, decoder) in steps.items():
        file = shared | {"normalizer": normalizer, "pre_tokenizer": pre, "post_processor": post}
        yield (
            "tokenizer",
            f"{name}.json",
            json.dumps(file | {"decoder": decoder, "model": model}).encode(),
        )


TEMPLATES = {
    "chatml": (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ),
    "macros": (
        "{%- macro turn(m, first=false) %}{{ bos_token if first }}[{{ m.role | upper }}] "
        "{{ m.content | trim }}{% endmacro -%}{% set ns = namespace(n=0) %}{% for m in messages %}"
        "{% if m.role not in ['user', 'assistant'] %}{{ raise_exception('no ' ~ m.role) }}{% endif %}"
        "{% set ns.n = ns.n + m.content | length %}{{ turn(m, loop.first) }}{% if loop.index0 % 2 == 1 %}"
        "{{ eos_token }}{% endif %}{% endfor %}{# end #}{{ ns.n * 2 }}{{ messages | tojson }}"
    ),
    "tags": (
        "{% for m in messages[::-1] %}{% if m.content is not string %}{% continue %}{% endif %}"
        "{% generation %}{{ m.content.split('x')[0] }}{% endgeneration %}{% break %}{% endfor %}"
        "{{ strftime_now('%Y') }}{% raw %}{{ }}{% endraw %}{{ tools is none }}{{ 7 // 2 ** 2 }}"
    ),
}  # fmt: skip


def templates() -> Iterator[tuple[str, str, bytes]]:
    """Chat templates; those of two targets are the same."""
    for name, text in TEMPLATES.items():
        config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": text}
        for target in ("template", "chat"):
            yield target, f"{name}.json", json.dumps(config).encode()


def main() -> None:
    """Make them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("targets", nargs="*", metavar="TARGET", help="only these")
    wanted = parser.parse_args().targets
    with tempfile.TemporaryDirectory() as folder:
        seeds = [
            *exported(Path(folder)),
            *stores(),
            *edits(),
            *checkpoints(),
            *tokenizers(),
            *templates(),
        ]
    for target, name, data in seeds:
        if (wanted and target not in wanted) or len(data) > MAX_SEED_NBYTES:
            print(f"{target}/{name}: {len(data)} bytes, left out")
            continue
        (SEEDS / target).mkdir(parents=True, exist_ok=True)
        (SEEDS / target / name).write_bytes(data)
        print(f"{target}/{name}: {len(data)} bytes")


if __name__ == "__main__":
    main()
