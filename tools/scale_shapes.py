"""Compute what models of 1B to 70B take, with tables as the STEM paper places them.

    python tools/scale_shapes.py

Sizes come from the code that exports and loads: the same weight plan, record layout and footprint.
Prints Markdown; docs/scale.md says what it means.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from functools import cache
from typing import Literal, get_args

from stem_edge.bundle.expected import expected_footprint
from stem_edge.bundle.footprint import Footprint
from stem_edge.config import ModelConfig
from stem_edge.export.job.table_plan import FREQUENT, MIXED_SCALES, ExportRows
from stem_edge.graph.formats import BackboneFormat
from stem_edge.tables.rows import make_layout
from stem_edge.tables.shards import CRC_NBYTES
from stem_edge.tables.store import TableFormat
from stem_edge.units import format_rate

Share = Literal["1/3", "1/2", "full"]
KINDS: tuple[ExportRows, ...] = ("int8", "mixed", "fp16")  # of rows
SHARES: tuple[Share, ...] = get_args(Share)
GROUP = 128  # values that share a scale, in rows and in matrices
VOCABULARY = 128_256  # of Llama 3, which gave the texts' ids
# From the published config.json of Llama 3.1 and 3.2 and Qwen2.5, whose shapes the paper takes. Heads
# are untied, as in the paper. Name: vocabulary, d, layers, query heads, key heads, head, d_ff.
SHAPES = {
    "1B": (VOCABULARY, 2048, 16, 32, 8, 64, 8192),  # Llama 3.2
    "3B": (VOCABULARY, 3072, 28, 24, 8, 128, 8192),  # Llama 3.2
    "8B": (VOCABULARY, 4096, 32, 32, 8, 128, 14_336),  # Llama 3.1
    "14B": (152_064, 5120, 48, 40, 8, 128, 13_824),  # Qwen2.5
    "32B": (152_064, 5120, 64, 40, 8, 128, 27_648),  # Qwen2.5
    "70B": (VOCABULARY, 8192, 80, 64, 8, 128, 28_672),  # Llama 3.1
}


def stem_layers(share: Share, layers: int) -> tuple[int, ...]:
    """Return the layers with a table: every third, every second, or all but the first."""
    start, step = {"1/3": (2, 3), "1/2": (1, 2), "full": (1, 1)}[share]
    return tuple(range(start, layers, step))


@cache
def model_of(name: str, share: Share) -> ModelConfig:
    """Describe a shape with tables in a share of its layers."""
    vocab, dim, layers, heads, kv_heads, head, d_ff = SHAPES[name]
    return ModelConfig(
        vocab_size=vocab, dim=dim, n_layers=layers, n_heads=heads, n_kv_heads=kv_heads,
        head_dim=head, d_ff=d_ff, stem_layers=stem_layers(share, layers), norm_eps=1e-5,
        rope_theta=500_000.0, max_context=8192,
        biases=("wq", "wk", "wv") if vocab != VOCABULARY else (),
    )  # fmt: skip


@cache
def sizes_of(name: str, share: Share | None, rows: ExportRows = "int8") -> Footprint:
    """Sizes of the bundle that an export with an int4 backbone and such rows would write.

    share: None for the dense twin.
    """
    model = model_of(name, share) if share else model_of(name, "full").dense_twin()
    backbone = BackboneFormat(weights="int4", head="int4", block_size=GROUP, kv_peaks=True)
    return expected_footprint(
        model, backbone, tables_of(model, rows) if model.stem_layers else None
    )


def tables_of(model: ModelConfig, rows: ExportRows) -> TableFormat:
    """Format of the table store of a model, with rows as `stem-edge export --tables` names them."""
    records, parts = model.records, model.row_parts()
    if rows != "mixed":
        layout = make_layout(records, model.stem_layers, parts, rows, GROUP, "fp32")
        return TableFormat(tokens=model.vocab_size, stored=layout)
    layout = make_layout(records, model.stem_layers, parts, "int8", GROUP, MIXED_SCALES)
    rare = round((1 - FREQUENT) * records)
    narrow = make_layout(rare, model.stem_layers, parts, "int4", GROUP, MIXED_SCALES)
    return TableFormat(tokens=model.vocab_size, stored=layout, rare_tables=narrow, indexed=True)


def read_nbytes(footprint: Footprint) -> int:
    """Bytes that reading a record moves, its checksum included."""
    if footprint.table_format is None:
        raise ValueError("a dense model has no records")
    return footprint.table_format.mean_record_nbytes + CRC_NBYTES


HEADINGS = (
    "model", "layers with rows", "parameters, B", "in tables, B", "a step reads, GB", "dense, GB",
    "tables int8, GB", "mixed, GB", "fp16, GB", "record int8, kB", "record / step, %",
)  # fmt: skip


def shapes(names: Iterable[str] = SHAPES) -> list[tuple[str, str, *tuple[float, ...]]]:
    """Sizes of each shape, with tables in a share of its layers."""
    rows = list[tuple[str, str, *tuple[float, ...]]]()
    for name in names:
        dense = sizes_of(name, None)
        for share in SHARES:
            model, sizes = model_of(name, share), sizes_of(name, share)
            stored = [tables_of(model, rows).nbytes() for rows in KINDS]
            record = read_nbytes(sizes)
            figures = (
                (model.backbone_parameters + model.table_parameters) / 1e9,
                model.table_parameters / 1e9,
                sizes.step_nbytes / 1e9,
                dense.step_nbytes / 1e9,
                *(nbytes / 1e9 for nbytes in stored),
                record / 1e3,
                100 * record / sizes.step_nbytes,
            )
            rows.append((name, f"{len(model.stem_layers)} ({share})", *figures))
    return rows


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    style = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=__doc__, formatter_class=style).parse_args(arguments)
    lines = [HEADINGS, ("---", "---", *["---:"] * (len(HEADINGS) - 2))]
    for name, layers, *figures in shapes():
        lines.append((name, layers, *map(format_rate, figures)))
    print("\n".join(f"| {' | '.join(line)} |" for line in lines))


if __name__ == "__main__":
    main()
