"""Predicted sizes of bundles, compared with the sizes of weight files."""

from __future__ import annotations

import pytest
from installed import DEMO
from msgspec.structs import replace

from stem_edge.bundle.footprint import onnx_footprint
from stem_edge.bundle.opening import open_bundle
from stem_edge.graph.decode import decoding
from stem_edge.graph.formats import WeightType
from stem_edge.graph.names import EMBED


@pytest.mark.parametrize("head", ["fp32", "int8", "int4"])
def test_a_step_reads_all_weights_but_the_embedding(head: WeightType) -> None:
    manifest = open_bundle(DEMO).manifest
    assert manifest.backbone is not None
    format = replace(manifest.backbone, head=head, kinds={}, tied=False)
    built = decoding(manifest.model, manifest.tables, format)
    embedding = sum(t.nbytes for t in built.graphs[EMBED].tensors.values() if t.file)
    nbytes = built.plan.nbytes
    found = onnx_footprint(manifest.model, format, manifest.table_format, nbytes, 0)
    assert embedding and found.step_nbytes == nbytes - embedding
    assert found.flash_nbytes > found.step_nbytes
