"""Writes the backbone for ggml: a GGUF file. gguf_schema.py defines its keys and tensors."""

from __future__ import annotations

from typing import cast

import msgspec

from stem_edge.bundle.hub.names import shown_name
from stem_edge.errors import ExportError
from stem_edge.export.backbone.gguf_values import TensorSource
from stem_edge.export.backbone.gguf_writer import write_gguf
from stem_edge.export.checkpoints.checkpoint import Checkpoint
from stem_edge.export.job.files import Output
from stem_edge.export.job.plan import Plan, begin_layers
from stem_edge.export.quantization.hidden_states import importance_vectors
from stem_edge.export.quantization.streams import MatrixReader
from stem_edge.ggml import gguf_schema
from stem_edge.ggml.installed import installed_library
from stem_edge.ggml.library import Ggml
from stem_edge.graph.formats import GGUF, GgufFormat, GgufType, OwnTypes
from stem_edge.numerics.quantize import F32


def check_runnable(source: Checkpoint) -> None:
    if foreign := gguf_schema.foreign_parts(source.config):
        raise ExportError(
            f"{source.path}: has {', '.join(foreign)}, which run on onnxruntime only; export it "
            "with --engine onnxruntime"
        )
    if any(matrix.codes is not None for matrix in source.backbone.values()):
        raise ExportError(
            f"{source.path}: has codes with scales that no type of ggml "
            "holds; export it with --engine onnxruntime"
        )


def write_gguf_backbone(plan: Plan, out: Output) -> None:
    """Write backbone.gguf: the model's description, and all of its weights."""
    source, config, ggml = plan.source, plan.source.config, Ggml(installed_library())
    format = cast(GgufFormat, plan.format)
    importance, layers = dict[str, F32](), config.n_layers
    if format.importance:
        out.bar.begin("running the text", layers, layers=layers)
        done = lambda: out.bar.advance(1)
        importance = importance_vectors(source, plan.guides, done, plan.recipe.cpus)
    types = gguf_schema.tensor_types(config, format.weights)
    tensors = [
        TensorSource(
            gguf_schema.gguf_name(name),
            source.backbone[name],
            types[name],
            importance.get(name),
        )
        for name in config.backbone_shapes()
    ]
    begin_layers(out.bar, "writing weights", config)
    matrices = MatrixReader(plan.recipe.cpus, out.bar.advance)
    with out.file(GGUF) as file:
        write_gguf(file, ggml, _metadata(source, format.weights), tensors, matrices)


def _metadata(source: Checkpoint, weights: GgufType | OwnTypes) -> dict[str, gguf_schema.Value]:
    from gguf import LlamaFileType as Mixture  # imported only here, because the import takes long

    own = Mixture.GUESSED if weights != "f32" else Mixture.ALL_F32
    return {
        "general.architecture": gguf_schema.ARCHITECTURE,
        "general.name": shown_name(source.path.resolve()) or gguf_schema.ARCHITECTURE,
        "general.file_type": int(getattr(Mixture, f"MOSTLY_{weights}".upper(), own)),
        "general.quantization_version": gguf_schema.QUANTIZATION_VERSION,
        "general.alignment": gguf_schema.ALIGNMENT,
        gguf_schema.CONFIG_KEY: msgspec.json.encode(source.config, order="sorted").decode(),
    }
