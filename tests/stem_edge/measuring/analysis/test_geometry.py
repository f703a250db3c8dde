"""Geometry of rows, compared with plain numpy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from architectures import HASHED, SIZES, write
from installed import DEMO
from stores import write_store

import stem_edge
from stem_edge.bundle.manifest import MANIFEST, TABLES, encode_manifest
from stem_edge.bundle.opening import open_bundle
from stem_edge.commands.main import main
from stem_edge.config import ModelConfig
from stem_edge.errors import BundleError, InputError
from stem_edge.measuring.analysis import geometry_rows
from stem_edge.measuring.analysis.geometry import geometry
from stem_edge.measuring.analysis.geometry_rows import (
    THRESHOLDS,
    CosineSpread,
    all_norms,
    pair_cosines,
    row_norms,
    spread,
)
from stem_edge.numerics.quantize import F32
from stem_edge.tables.packing import pack_records
from stem_edge.tables.rows import RecordLayout

Capture = pytest.CaptureFixture[str]
TEXT = "The cat sat on the mat, and the dog on the hat. 0123456789 ABCDEFGHIJKLMNOPQRSTUVW!\n"


def all_cosines(vectors: F32) -> F32:
    """Cosines of all pairs, computed the obvious way."""
    long = vectors.astype(np.float64)
    units = long / np.linalg.norm(long, axis=1, keepdims=True)
    cosines: F32 = (units @ units.T)[np.triu_indices(len(units), 1)]
    return cosines


def agrees(found: CosineSpread | None, vectors: F32, tolerance: float = 1e-6) -> bool:
    """Return whether a spread is that of these vectors."""
    cosines = all_cosines(vectors)
    assert found is not None
    assert (found.vectors, found.pairs) == (len(vectors), len(cosines))
    pairs = [
        (found.mean, cosines.mean()),
        (found.deviation, cosines.std()),
        (found.least, cosines.min()),
        (found.greatest, cosines.max()),
        (found.p95_abs, np.percentile(np.abs(cosines), 95)),
    ]
    return all(abs(a - b) < tolerance for a, b in pairs)


def draw(count: int, width: int, seed: int = 0) -> F32:
    """Rows that are not all alike, nor at right angles."""
    random = np.random.default_rng(seed)
    return np.asarray(random.normal(0.3, 1, (count, width)), np.float32)


# ---------------------------------------------------------------- the numbers


def test_a_spread_is_what_numpy_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(geometry_rows, "ROWS_AT_ONCE", 7)
    vectors = draw(50, 24)
    found = spread(vectors)
    assert found is not None and agrees(found, vectors)
    cosines = all_cosines(vectors)
    for at in THRESHOLDS:
        assert abs(found.share_above[at] - (np.abs(cosines) > at).mean()) < 1e-9
    low, high = found.histogram_range
    inside = (cosines >= low) & (cosines <= high)
    assert abs(sum(found.histogram) - inside.sum()) <= 2  # those at the very ends
    assert found.least <= low < high <= found.greatest
    assert np.allclose(pair_cosines(vectors), cosines, atol=1e-6)


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1e30])
def test_lengths_do_not_matter(scale: float) -> None:
    vectors = draw(20, 16)
    vectors[::2] *= np.float32(scale)
    assert agrees(spread(vectors), vectors)


def test_vectors_of_zeros_are_left_out() -> None:
    vectors = draw(20, 16)
    vectors[3] = vectors[9] = 0
    assert agrees(spread(vectors), vectors[vectors.any(axis=1)])
    assert spread(vectors[[3, 4, 9]]) is None


def test_equal_and_opposite_vectors() -> None:
    found = spread(np.array([[1, 2, 2], [2, 4, 4], [-1, -2, -2]], np.float32))
    assert found is not None
    assert (found.least, found.greatest, found.p95_abs) == (-1, 1, 1)
    assert set(found.share_above.values()) == {1.0}


def test_random_directions_are_as_the_yardsticks_say() -> None:
    width, count = 400, 1500
    vectors = np.random.default_rng(1).normal(size=(count, width)).astype(np.float32)
    found = spread(vectors)
    assert found is not None
    assert abs(found.p95_abs / geometry_rows.random_p95(width) - 1) < 0.02


# ---------------------------------------------------------------- the table, streamed

TOKENS, WIDTH = 103, 16


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, dict[int, F32]]:
    """Tables of two layers in shards of 40 records, read in batches of 7, mapped anew after 14."""
    rows = {1: draw(TOKENS, WIDTH, 1), 4: draw(TOKENS, WIDTH, 4)}
    rows[1][5] = 0
    rows[4][60] = rows[4][2]  # as near to 2 as can be
    layout = RecordLayout(records=TOKENS, layers=(1, 4), parts=((WIDTH,),), row_type="fp32")
    write_store(tmp_path / "t", layout, pack_records(layout, list(rows.values())), 40)
    monkeypatch.setattr(geometry_rows, "BATCH_NBYTES", 7 * layout.record_nbytes)
    monkeypatch.setattr(geometry_rows, "MAPPED_NBYTES", 14 * layout.record_nbytes)
    return tmp_path / "t", rows


def test_streaming_gives_the_norms_of_all_rows(store: tuple[Path, dict[int, F32]]) -> None:
    norms = all_norms(store[0], TOKENS, [1, 4], show=False)
    for layer, rows in store[1].items():
        assert np.allclose(norms[layer], np.linalg.norm(rows, axis=1), rtol=1e-6)
    assert norms[1][5] == 0


def test_norms_whose_squares_overflow_and_values_that_are_not_finite() -> None:
    rows = np.array([[3e25, 4e25], [3e-25, 4e-25], [0, 0], [3, 4]], np.float32)
    assert np.allclose(row_norms(rows, 1, 0), [5e25, 5e-25, 0, 5], rtol=1e-6, atol=0)
    rows = np.array([[1, 2], [1, np.inf], [np.nan, 1]], np.float32)
    with pytest.raises(BundleError, match=r"token 41 in layer 7 .*stem-edge verify"):
        row_norms(rows, 7, 40)


# ---------------------------------------------------------------- a bundle


@pytest.mark.parametrize("sample", [40, 2048])
def test_a_bundle_of_quantized_rows(tiny_bundle: Path, sample: int) -> None:
    found = geometry(tiny_bundle, sample=sample, seed=3)
    assert (found.tokens, found.width, found.row_type) == (300, 64, "int8")
    assert (found.sample, found.seed) == (sample, 3)
    assert [each.layer for each in found.layers] == [1, 2]
    chosen = np.sort(np.random.default_rng(3).permutation(300)[:sample])
    with stem_edge.open_tables(tiny_bundle) as tables:
        for each in found.layers:
            rows, norms = tables[:, each.layer], each.norms
            assert agrees(each.cosines, rows[chosen])
            lengths = np.linalg.norm(rows, axis=1)
            expected = lengths.min(), np.median(lengths), lengths.max()
            assert norms is not None
            assert np.allclose([norms.least, norms.median, norms.greatest], expected)
    again = geometry(tiny_bundle, sample=sample, seed=3, layers=[2, 2])
    assert again.layers == found.layers[1:]


def test_a_bundle_of_mixed_tables(tiny_checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text(TEXT * 5)
    options: Any = {"tables": "mixed", "frequent": 0.1, "calibration": tmp_path / "text"}
    stem_edge.export_bundle(tiny_checkpoint, tmp_path / "out", backbone="fp32", **options)
    found = geometry(tmp_path / "out")
    assert found.row_type == "mixed"
    with stem_edge.open_tables(tmp_path / "out") as tables:
        rows = tables[:, 1]
    assert agrees(found.layers[0].cosines, rows)


def test_a_bundle_for_ggml_alone(tiny_gguf: Path) -> None:
    assert geometry(tiny_gguf).row_type == "fp32"


def test_rows_of_zeros_are_counted_and_left_out(tiny_bundle: Path, tmp_path: Path) -> None:
    bundle = with_rows(tiny_bundle, tmp_path, zero=[0, 7, 299])
    first, second = geometry(bundle).layers
    assert (first.zero_rows, second.zero_rows) == (3, 0)
    assert first.cosines is not None and second.cosines is not None
    assert (first.cosines.vectors, second.cosines.vectors) == (297, 300)
    assert first.norms is not None and first.norms.least > 0


def test_a_table_of_zeros(tiny_bundle: Path, tmp_path: Path, capsys: Capture) -> None:
    bundle = with_rows(tiny_bundle, tmp_path, zero=list(range(300)))
    assert main(["inspect", str(bundle), "--geometry"]) == 0
    out = capsys.readouterr().out
    (line,) = (line for line in out.splitlines() if line.startswith("    1") and "-" in line)
    assert line.split() == ["1", *"-----", "0", "0", "0", "300"]


def with_rows(source: Path, tmp_path: Path, zero: list[int]) -> Path:
    """A copy of a bundle whose first table has rows of zeros."""
    opened = open_bundle(source)
    layout = opened.manifest.tables
    assert layout is not None
    with stem_edge.open_tables(source) as tables:
        rows = [tables[:, layer] for layer in tables.layers]
    rows[0][zero] = 0
    out = tmp_path / "copy"
    out.mkdir()
    for name in opened.manifest.files:
        if not name.startswith(TABLES):
            (out / name).hardlink_to(source / name)
    write_store(out / TABLES, layout, pack_records(layout, rows), 300)
    files = {n: e for n, e in opened.manifest.files.items() if not n.startswith(TABLES)}
    for path in (path for path in (out / TABLES).rglob("*") if path.is_file()):
        entry = msgspec.structs.replace(
            opened.manifest.files["tokenizer.json"], nbytes=path.stat().st_size
        )
        files[path.relative_to(out).as_posix()] = entry
    manifest = msgspec.structs.replace(opened.manifest, files=files)
    (out / MANIFEST).write_bytes(encode_manifest(manifest))
    return out


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": [1, 2]}, r"layer 2 has no table in .*: 1, 3, 5"),
        ({"layers": []}, "layers is empty"),
        ({"sample": 1}, "sample is 1; expected 2 to 8192"),
        ({"sample": 8193}, "sample is 8193; expected 2 to 8192"),
        ({"seed": -1}, "seed is -1"),
    ],
    ids=str,
)  # fmt: skip
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        geometry(DEMO, **options)


def test_models_without_rows_of_tokens(tmp_path: Path) -> None:
    for name, changes, message in (
        ("dense", {"stem_layers": ()}, "a dense model has no tables"),
        ("hashed", HASHED, "5 experts"),
    ):
        checkpoint, _, _ = write(tmp_path / name, ModelConfig(**(SIZES | changes)))
        out = tmp_path / f"{name}.bundle"
        stem_edge.export_bundle(checkpoint, out, backbone="fp32", tables="fp32")
        with pytest.raises(InputError, match=message):
            geometry(out)


# ---------------------------------------------------------------- the command


def run(capsys: Capture, *options: str) -> str:
    assert main(["inspect", str(DEMO), "--geometry", *options]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def test_the_table_fits_a_terminal_and_says_what_it_is(capsys: Capture) -> None:
    out = run(capsys, "--sample", "500", "--seed", "9")
    assert max(map(len, out.splitlines())) <= 80
    words = " ".join(out.split())
    assert "all pairs of up to 500 rows of a layer (seed 9)" in words
    assert "lengths of all 1,756 rows" in words
    rows = [line.split() for line in out.splitlines() if line[:5].strip() in set("135")]
    assert [row[0] for row in rows[:3]] == ["1", "3", "5"]
    first = geometry(DEMO, sample=500, seed=9).layers[0]
    assert first.cosines is not None and first.norms is not None
    assert rows[0][2] == f"{first.cosines.p95_abs:.3f}"
    assert rows[0][6:9] == [f"{v:.3g}" for v in vars(first.norms).values()]


def test_json_has_all_figures(capsys: Capture) -> None:
    figures = json.loads(run(capsys, "--layers", "5, 1", "--json"))
    found = geometry(DEMO, layers=[1, 5])
    assert set(figures) == set(vars(found))
    layer, expected = figures["layers"][1], found.layers[1].cosines
    assert expected is not None
    assert layer["layer"] == 5
    assert layer["cosines"]["p95_abs"] == expected.p95_abs
    assert layer["cosines"]["histogram"] == list(expected.histogram)
    assert layer["cosines"]["share_above"]["0.1"] == expected.share_above[0.1]
    assert figures["random_p95_abs"] == pytest.approx(0.1, abs=1e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--sample", "9"], "--sample: only for --geometry; add --geometry"),
        (["--seed", "0", "--sample", "9"], "--sample and --seed: only for --geometry"),
        (["--cost", "--layers", "1"], "--layers: only for --geometry"),
        (["--geometry", "--token", "x"], "--token is gone; read rows with stem_edge.open_tables"),
        (["--geometry", "--layers", "1;3"], "--layers '1;3': not numbers"),
        (["--geometry", "--layers", ""], "--layers '': not numbers"),
        (["--geometry", "--layers", "0"], "layer 0 has no table"),
        (["--geometry", "--plot", "x.png"], "--plot is gone; --json has the histograms to draw"),
        (["--geometry", "--text", "x"], "--text x: activations are no longer compared, only rows"),
        (["--geometry", "--engine", "ggml"], "add --memory"),
    ],
    ids=str,
)
def test_wrong_options_of_the_command(options: list[str], message: str, capsys: Capture) -> None:
    assert main(["inspect", str(DEMO), *options]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err and err.count("\n") == 1
