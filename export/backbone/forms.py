"""The forms of a backbone that exports write, by the engine that runs them."""

from __future__ import annotations

from stem_edge.export.backbone.form import Form
from stem_edge.export.backbone.gguf import GgufForm
from stem_edge.export.backbone.onnx import OnnxForm
from stem_edge.graph.formats import BackboneFormat, EngineName, GgufFormat

FORMS: dict[EngineName, Form] = {BackboneFormat.engine: OnnxForm(), GgufFormat.engine: GgufForm()}
