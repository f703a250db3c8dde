"""Keeps the types of a quantized checkpoint, so that its weights are not rounded again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from msgspec.structs import replace as changed

from stem_edge.config import ModelConfig
from stem_edge.errors import ExportError
from stem_edge.export.checkpoints.checkpoint import Checkpoint
from stem_edge.export.job.plan import TYPE_OF_BITS, Format, Plan, plan_of
from stem_edge.export.job.recipe import KEEP, Recipe
from stem_edge.export.job.table_plan import RowStorage
from stem_edge.ggml.gguf_schema import short_types, tensor_types
from stem_edge.ggml.types import TensorType
from stem_edge.graph.formats import (
    GGUF_TYPES,
    MATRIX_KINDS,
    BackboneFormat,
    GgufFormat,
    WeightType,
    usual_type,
)
from stem_edge.graph.layer import kind_of
from stem_edge.graph.names import head_width
from stem_edge.tables.codecs import CODECS

# GGUF types that 4 bits with an offset store without loss. Q4_0 needs no offset.
FOUR_BITS = ("Q4_0", "Q4_1", "Q4_K")
# 8 bits store Q8_0 without loss. For the other types, the added error is smaller than their own.
EIGHT_BITS = ("Q5_0", "Q5_1", "Q5_K", "Q6_K", "Q8_0")
FLOATS = ("F32", "F16", "BF16")
BLOCK = 32  # values per block in Q4_0, Q4_1 and Q8_0, and per sub-block in Q4_K
PACKED_BLOCK = 128  # values per block; kernels for 2 bits lack larger blocks, or are slow with them


def keep_stored_types(source: Checkpoint, recipe: Recipe) -> Plan:
    """Return a plan that keeps a quantized checkpoint's types, unless the recipe names a type.

    Matrices changed by an adapter have no stored type, so a model with an adapter is quantized as usual.
    """
    plan = plan_of(source, recipe)
    if recipe.rows is None:
        plan = replace(plan, rows=_stored_rows(source) or plan.rows)
    matrices = {name: m for name, m in source.backbone.items() if len(m.shape) == 2}
    types = {name: m.stored.type for name, m in matrices.items() if m.stored}
    found: Format | None = None
    if packed := {name: m.codes.bits for name, m in matrices.items() if m.codes}:
        chosen = recipe.type not in (None, KEEP) or recipe.prefill_graph
        if chosen and (recipe.type != "fp32" or recipe.prefill_graph):
            raise ExportError(
                f"{source.path}: its matrices are codes of their own types, so neither type nor "
                "prefill_graph can be chosen; leave them out, or take --type fp32"
            )
        found = None if chosen else _packed(source, packed)
    elif recipe.type in (None, KEEP) and types and len(types) == len(matrices):
        keeping = in_gguf if recipe.engine == GgufFormat.engine else in_blocks
        found = keeping(source.config, types)
    if found is None:
        if recipe.type == KEEP:
            raise ExportError(
                f"{source.path}: its matrices have no types that {recipe.engine} can keep; leave out --type keep"
            )
        return plan
    plan = replace(plan, format=found, nats=None, own_types=True)
    if plan.judged and found.packed:
        plan = replace(plan, format=changed(found, kv_peaks=True))
    return plan


def in_gguf(config: ModelConfig, types: dict[str, TensorType]) -> GgufFormat:
    """Return the ggml format with these tensor types: if possible, one of llama.cpp's mixtures."""
    for mixture in GGUF_TYPES:
        planned = tensor_types(config, mixture)
        if all(planned[name] == kind for name, kind in types.items()):
            return GgufFormat(weights=mixture)
    return GgufFormat(weights=short_types(types))


def _stored_rows(source: Checkpoint) -> RowStorage | None:
    """Return the type of a checkpoint's quantized table rows; None for float or mixed types."""
    found = {
        (codes.bits, codes.group_size, codes.scale_type)
        for table in source.tables.values()
        if (codes := table.codes) is not None
    }
    if len(found) != 1:
        return None
    ((bits, group_size, scales),) = found
    kind = next(name for name, codec in CODECS.items() if codec.scaled and codec.bits == bits)
    return RowStorage(kind, group_size, scales=scales)


def _packed(source: Checkpoint, bits: Mapping[str, int]) -> BackboneFormat:
    """Return the onnxruntime format that keeps quantized codes. bits: matrix -> bits of a code."""
    config, found = source.config, dict[str, dict[str, WeightType]]()  # kind -> product -> type
    for name, shape in config.backbone_shapes().items():
        if len(shape) != 2 or (kind := kind_of(name)) not in MATRIX_KINDS:
            continue
        if kind in ("qkv", "wo") and name in bits and _padded(config, int(name.split(".")[1])):
            raise ExportError(
                f"{source.path}: {name} is packed, and onnxruntime needs heads of another width, which its "
                "codes cannot have; take --type fp32"
            )
        product, type = _product(config, name), TYPE_OF_BITS[bits[name]] if name in bits else "fp32"
        if found.setdefault(kind, {}).setdefault(product, type) != type:
            raise ExportError(
                f"{source.path}: the matrices of {product} have different types, which no product "
                "of onnxruntime takes together; take --type fp32"
            )
    found.setdefault("head", dict(found["embedding"]))
    usual = {kind: Counter(of.values()).most_common(1)[0][0] for kind, of in found.items()}
    head, weights = usual["head"], usual.get("gate", usual["wo"])
    return BackboneFormat(
        weights=weights,
        head=head,
        block_size=PACKED_BLOCK,
        kinds={
            kind: usual[kind]
            for kind in MATRIX_KINDS
            if kind in usual and usual[kind] != usual_type(kind, weights, head)
        },
        matrices={
            name: type
            for kind, of in found.items()
            for product, type in of.items()
            if type != usual[kind]
            # Otherwise wv would be a separate product with the usual type.
            for name in (product, *([product[:-3] + "v"] if product.endswith(".qkv") else ()))
        },
    )


def _product(config: ModelConfig, name: str) -> str:
    """Return the name of a matrix's product in the graph: qkv, if wq, wk and wv share one."""
    at, _, part = name.rpartition(".")
    if part not in ("wq", "wk", "wv"):
        return name
    alone = config.layer(int(at.split(".")[1])).kv_layer != int(at.split(".")[1])
    return name if name in config.ranges and not alone else f"{at}.qkv"


def in_blocks(config: ModelConfig, own: dict[str, TensorType]) -> BackboneFormat | None:
    """Return the onnxruntime format for the GGUF types `own` (matrix name -> type).

    None if no matrix is quantized, or if one has fewer than 4 bits.
    """
    types = {name: kind.name for name, kind in own.items()}
    if not {*types.values()} & {*FOUR_BITS, *EIGHT_BITS}:
        return None
    if {*types.values()} - {*FOUR_BITS, *EIGHT_BITS, *FLOATS}:
        return None  # types of 2 or 3 bits would only become larger
    products = dict[str, list[str]]()  # name -> types of the matrices stacked in it
    for name, kind in types.items():
        at, _, part = name.rpartition(".")
        product = "v" if part == "wv" else kind_of(name)
        products.setdefault(f"{at}.{product}" if at else product, []).append(kind)
    products.setdefault("head", products["embedding"])
    four = {name for name, parts in products.items() if {*parts} <= {*FOUR_BITS}}
    four -= {f"layers.{n}.wo" for n in range(config.n_layers) if _padded(config, n)}
    offsets = any(kind != "Q4_0" for name in four - {"embedding"} for kind in products[name])
    if offsets:  # gathered rows cannot have offsets
        four -= {"embedding", "head"} if config.tied_head else {"embedding"}
    bits: dict[str, WeightType] = {name: "int4" if name in four else "int8" for name in products}
    layers = {name: kind for name, kind in bits.items() if name.startswith("layers.")}
    small, apart = "int4" in layers.values(), bits["embedding"] != bits["head"]
    return BackboneFormat(
        weights="int4" if small else "int8",
        head=bits["head"],
        block_size=BLOCK,
        kinds={"embedding": bits["embedding"]} if apart else {},
        matrices={n: layers[n] for n in sorted(layers) if layers[n] == "int8"} if small else {},
        offsets=offsets,
    )


def _padded(config: ModelConfig, layer: int) -> bool:
    """Return True if graphs pad a layer's heads, which puts zeros into quantized blocks of wo."""
    own = config.layer(layer)
    return head_width(own) != own.head_dim
