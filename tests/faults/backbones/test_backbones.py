"""Catalogue B: backbones of a wrong size, damaged ones that still load, failing runs."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from contract import command_refused, refused
from forging import sealed
from installed import needs_ggml
from loading import load_fixed
from stores import write_store

import stem_edge
from stem_edge.bundle.manifest import TABLES
from stem_edge.bundle.opening import open_bundle
from stem_edge.errors import BackendError, BundleError, OutOfMemoryError, StemEdgeError
from stem_edge.ggml import library
from stem_edge.ggml.gguf_tensors import locate
from stem_edge.graph.decode import decoding
from stem_edge.graph.formats import BACKBONE_DATA, GGUF
from stem_edge.tables.packing import pack_records

NOT_APPLICABLE: dict[str, str] = {
    "B1 B2 B3 B4 B5 B6 B7 B11 B12 B16": "No graph or GGUF header of a bundle is parsed: it is built or planned from the manifest.",
    "B9": "Native code reads no file of a bundle but weights: graphs are built here, so nothing in it can crash it.",
    "B10": "Native code reads no file of a bundle but weights: graphs are built here, so nothing in it can hang it.",
}
IDS = [1, 2, 3, 4, 5, 6, 7, 8, 9]
BAD_TOKEN = 7
FOUR = stem_edge.SamplingParams(max_new_tokens=4)


@pytest.fixture
def bundle(tiny: Path) -> Path:
    """A bundle for each engine in turn."""
    return tiny


def last_norm(bundle: Path) -> tuple[str, int]:
    """File and first byte of the last norm's weight."""
    manifest = open_bundle(bundle).manifest
    if manifest.gguf is not None:
        nbytes, weights = manifest.files[GGUF].nbytes, manifest.gguf.weights
        tensors = locate(bundle / GGUF, nbytes, manifest.model, weights).tensors
        return GGUF, tensors["norm"].offset
    assert manifest.backbone is not None
    graphs = decoding(manifest.model, manifest.tables, manifest.backbone).graphs
    return BACKBONE_DATA, graphs["head"].tensors["norm"].offset


def with_norm(bundle: Path, out: Path, value: float) -> Path:
    """A bundle whose checksums are right and whose last norm has another weight."""
    name, at = last_norm(bundle)
    data = bytearray((bundle / name).read_bytes())
    data[at : at + 4] = np.float32(value).tobytes()
    return sealed(bundle, out, {name: bytes(data)})


def test_b13_damage_that_loads_is_found_by_checksums(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Any byte of a weight may be anything, so no other check can see it."""
    name, at = last_norm(bundle)
    copy = Path(shutil.copytree(bundle, tmp_path / "copy"))
    with (copy / name).open("r+b") as file:
        file.seek(at)
        file.write(b"\x01")
    command_refused(capsys, ["verify", copy], "1 of ", kept=[copy])


@needs_ggml
def test_b14_tensors_of_another_model_in_a_file_of_the_same_size(
    tiny_gguf: Path, tmp_path: Path
) -> None:
    """Names, shapes and places stand in its header, which is as we would write it."""
    data = (tiny_gguf / GGUF).read_bytes()
    at = data.rindex(b"blk.0.attn_q.weight")
    changed = data[:at] + b"blk.0.attn_q.Weight" + data[at + len(b"blk.0.attn_q.weight") :]
    copy = sealed(tiny_gguf, tmp_path / "copy", {GGUF: changed})
    refused(lambda: open_bundle(copy), BundleError, copy / GGUF, "other tensors")


@needs_ggml
@pytest.mark.parametrize("nbytes", [0, 31, 1000, -32, -1, 1, 32])
def test_b8_a_gguf_file_that_is_cut_or_too_long(
    nbytes: int, tiny_gguf: Path, tmp_path: Path
) -> None:
    """It is refused even if the manifest lists its size, because the size follows from the model."""
    data = (tiny_gguf / GGUF).read_bytes() + bytes(32)
    end = len(data) - 32 + nbytes if nbytes in (-32, -1, 1, 32) else nbytes
    copy = sealed(tiny_gguf, tmp_path / "copy", {GGUF: data[:end]})
    refused(lambda: load_fixed(copy), BundleError, copy, "export", kept=[copy])


@pytest.mark.slow
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_b17_weights_that_are_not_finite(bundle: Path, tmp_path: Path, value: float) -> None:
    """Generating and scoring end in the same error, again and again, and nothing hangs."""
    copy = with_norm(bundle, tmp_path / "copy", value)
    with load_fixed(copy) as model:
        for _ in range(2):
            refused(
                lambda: list(model.generate(IDS, FOUR)), BackendError, "not finite", "position 8"
            )
            refused(lambda: model.logits(IDS), BackendError, "not finite", "position 0")


def with_row(bundle: Path, out: Path) -> Path:
    """A bundle with random rows, all checksums right, and the row of one token not finite."""
    shutil.copytree(bundle, out)
    layout = stem_edge.open_bundle(out).manifest.tables
    assert layout is not None
    rng, shape = np.random.default_rng(0), (layout.records, layout.row_width)
    rows = [rng.standard_normal(shape, np.float32) for _ in layout.layers]
    records = pack_records(layout, rows)
    bad = records[BAD_TOKEN : BAD_TOKEN + 1]
    values = layout.row_scales(bad, 0) if layout.quantized else layout.row_codes(bad, 0)
    values[:] = np.nan
    shards = [p for p in (out / TABLES).rglob("*") if p.is_file() and p.parent.parent.name == "c"]
    assert len(shards) == 1
    shutil.rmtree(out / TABLES)
    write_store(out / TABLES, layout, records, layout.records)
    files = [path for path in (out / TABLES).rglob("*") if path.is_file()]
    names = {path.relative_to(out).as_posix(): path.read_bytes() for path in files}
    copy = sealed(out, out.with_suffix(".sealed"), names)
    assert names.keys() <= stem_edge.open_bundle(copy).manifest.files.keys()
    return copy


@pytest.mark.parametrize("options", [{}, {"device_memory": "100MB"}], ids=str)
def test_b17_a_row_that_is_not_finite_fails_only_its_readers(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    """Requests with its token fail; all others are answered as before."""
    others = [token for token in IDS if token != BAD_TOKEN]
    bundle = with_row(_fp32_tables(tmp_path), tmp_path / "copy")
    with load_fixed(bundle, **options) as model:
        expected = model.logits(others)
        refused(lambda: model.logits(IDS), StemEdgeError)
        refused(lambda: list(model.generate([BAD_TOKEN], FOUR)), StemEdgeError)
        assert np.array_equal(model.logits(others), expected)
        assert np.isfinite(expected).all()
        found, texts = (
            dict[int, StemEdgeError | None](),
            [others[:4], [*others[:4], BAD_TOKEN], others],
        )
        for number, chunk in model.generate_many(iter(texts), FOUR):
            found[number] = chunk.error
        assert found[0] is found[2] is None and isinstance(found[1], BackendError)


def _fp32_tables(tmp_path: Path) -> Path:
    from make_checkpoint import Shape, write_checkpoint

    checkpoint = write_checkpoint(tmp_path / "checkpoint", Shape())
    out = tmp_path / "out"
    stem_edge.export_bundle(checkpoint, out, type="fp32", rows="fp32")
    return out


# Runs that fail


def test_b15_a_run_that_fails_is_an_error_of_one_line(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = RuntimeError("[ONNXRuntimeError] : 1 : FAIL :\nin a\r\n\x1b[0m" + "x" * 5000)
    run, runs, errors = ort.InferenceSession.run_with_iobinding, [0], [RecursionError(), failed]

    def failing(*given: Any) -> None:
        runs[0] += 1
        if runs[0] == 3:
            raise errors.pop()
        run(*given)

    with load_fixed(tiny_bundle) as model:
        expected = list(model.generate(IDS, FOUR))
    monkeypatch.setattr(ort.InferenceSession, "run_with_iobinding", failing)
    with load_fixed(tiny_bundle) as model:  # its sessions bind that
        runs[0] = 0
        refused(lambda: list(model.generate(IDS, FOUR)), BackendError, ": in a", "position")
        assert list(model.generate(IDS, FOUR)) == expected
        runs[0] = 0
        with pytest.raises(RecursionError):  # as from a signal handler
            list(model.generate(IDS, FOUR))


@pytest.mark.slow
@needs_ggml
@pytest.mark.parametrize(("status", "error"), [(-1, BackendError), (-2, OutOfMemoryError)])
def test_b15_a_status_of_ggml_is_an_error_of_one_line(
    tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch, status: int, error: type[StemEdgeError]
) -> None:
    real, found = library._function, [0]

    def function(path: Path, handles: Any, name: str, *rest: Any) -> Any:
        call = real(path, handles, name, *rest)
        return (
            (lambda *given: found[0] or call(*given)) if name == "backend_graph_compute" else call
        )

    monkeypatch.setattr(library, "_function", function)
    with load_fixed(tiny_gguf) as model:
        expected = list(model.generate(IDS, FOUR))
        found[0] = status
        refused(lambda: list(model.generate(IDS, FOUR)), error, "ggml")
        found[0] = 0
        assert list(model.generate(IDS, FOUR)) == expected
