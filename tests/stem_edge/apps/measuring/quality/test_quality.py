"""Figures of `stem-edge eval`, compared with float64 formulas over Model.logits."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conformance import CHECKPOINT, TEXT
from installed import DEMO
from loading import load_fixed

import stem_edge
from stem_edge.apps.measuring.quality.quality import Quality
from stem_edge.apps.measuring.quality.scores import windows
from stem_edge.errors import InputError
from stem_edge.numerics.quantize import F64


def evaluate(bundle: Path, text: str, **options: Any) -> Quality:
    """Score a text instead of a file."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "text.txt"
        file.write_bytes(text.encode())
        return stem_edge.evaluate(bundle, file, **options)


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """fp32 and int4 bundles of the checkpoint."""
    root = tmp_path_factory.mktemp("quality")
    types: list[Any] = ["fp32", "int4"]
    for kind in types:
        stem_edge.export_bundle(CHECKPOINT, root / kind, type=kind, rows=kind)
    return {kind: root / kind for kind in types}


def log_probabilities(bundle: Path, ids: list[int]) -> F64:
    with load_fixed(bundle) as model:
        model.engine.uses_prefill = False
        logits = model.logits(ids).astype(np.float64)
    probabilities = np.exp(logits - logits.max(axis=1, keepdims=True))
    found: F64 = np.log(probabilities / probabilities.sum(axis=1, keepdims=True))
    return found


def token_ids(bundle: Path, text: str) -> list[int]:
    with load_fixed(bundle) as model:
        return model.tokenize(text)


@pytest.mark.parametrize("tokens", [2, 3, 7, 8, 9, 20, 33])
@pytest.mark.parametrize(("window", "stride"), [(1, 1), (4, 1), (4, 3), (4, 4), (8, 5), (40, 20)])
def test_every_token_is_predicted_once_from_enough_context(
    tokens: int, window: int, stride: int
) -> None:
    predicted = list[int]()
    for start, stop, first in windows(tokens, window, stride):
        assert start <= first < stop <= start + window
        assert stop < tokens
        predicted += range(first + 1, stop + 1)
        context = first + 1 - start  # of its first prediction, which has the least
        assert start == 0 or context >= window - stride + 1
    assert predicted == list(range(1, tokens))


def plain_formula(ids: list[int], window: int, stride: int) -> float:
    """Log likelihood of all tokens but the first, window by window."""
    total = 0.0
    for start in range(0, len(ids) - 1, stride):
        shown = ids[start : min(start + window, len(ids) - 1)]
        log_p, already = log_probabilities(DEMO, shown), window - stride if start else 0
        total += sum(float(log_p[at, ids[start + at + 1]]) for at in range(already, len(shown)))
        if start + window >= len(ids) - 1:
            break
    return total


LINES = ["The capital of France is Paris.", "", "  ", "The capital of Peru is Lima."]
SHORT_WINDOWS = [pytest.param(*pair, marks=pytest.mark.slow) for pair in ((16, 8), (9, 4), (1, 1))]


@pytest.mark.parametrize(("window", "stride"), [(None, None), *SHORT_WINDOWS])
@pytest.mark.parametrize("lines", [False, True])
def test_figures_are_the_plain_formula(lines: bool, window: int | None, stride: int | None) -> None:
    """Lines are documents closed by the end token, and empty ones count for nothing."""
    ends = [stem_edge.open_bundle(DEMO).manifest.model.eos_ids[0]] * lines
    texts = [LINES[0], LINES[3]] if lines else [TEXT]
    documents = [token_ids(DEMO, text) + ends for text in texts]
    found = evaluate(DEMO, "\n".join(LINES) if lines else TEXT, window=window, lines=lines)
    total = sum(plain_formula(ids, window or 256, stride or 256) for ids in documents)
    tokens, bits = sum(len(ids) - 1 for ids in documents), -total / math.log(2)
    assert (found.documents, found.tokens) == (len(texts), tokens)
    assert found.perplexity == pytest.approx(math.exp(-total / tokens), rel=1e-9)
    assert found.nbytes == sum(len(text.encode()) + lines for text in texts)
    assert found.bits_per_byte == pytest.approx(bits / found.nbytes, rel=1e-9)
    if window is None and not lines:
        assert (found.window, found.stride) == (tokens, tokens // 2)
    assert found.divergence is None


def test_a_bundle_does_not_diverge_from_itself() -> None:
    found = evaluate(DEMO, TEXT, against=DEMO, window=16).divergence
    assert found is not None
    assert (found.mean, found.percentile_99, found.greatest, found.agreement) == (0, 0, 0, 1)


def test_divergence_is_the_plain_formula(bundles: dict[str, Path]) -> None:
    ids = token_ids(bundles["int4"], TEXT)
    quality = evaluate(bundles["int4"], TEXT, window=128, against=bundles["fp32"])
    found, came = quality.divergence, (np.arange(len(ids) - 1), ids[1:])
    p, q = (log_probabilities(bundles[kind], ids[:-1]) for kind in ("fp32", "int4"))
    nats = (np.exp(p) * (p - q)).sum(axis=1)
    assert found is not None
    assert found.mean == pytest.approx(nats.mean(), rel=1e-6)
    assert found.mean > 1e-3
    assert found.percentile_99 == pytest.approx(np.percentile(nats, 99), rel=1e-6)
    assert found.greatest == pytest.approx(nats.max(), rel=1e-6)
    assert found.agreement == (p.argmax(axis=1) == q.argmax(axis=1)).mean()
    assert found.reference_perplexity == pytest.approx(math.exp(-p[came].mean()), rel=1e-9)


@pytest.mark.slow
def test_an_exact_bundle_does_not_diverge_from_its_checkpoint(bundles: dict[str, Path]) -> None:
    pairs = ("fp32", CHECKPOINT), ("int4", CHECKPOINT), ("int4", bundles["fp32"])
    exact, coarse, by_bundle = (
        evaluate(bundles[kind], TEXT, window=32, against=source).divergence
        for kind, source in pairs
    )
    assert exact is not None and coarse is not None and by_bundle is not None
    assert exact.greatest < 1e-6  # logits are float32
    assert exact.agreement == 1
    assert coarse.mean > 1e-3
    assert coarse.mean == pytest.approx(by_bundle.mean, rel=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"text": ""}, "too few tokens"),
        ({"text": " \n\n", "lines": True}, "too few tokens"),
        ({"window": 0}, r"window is 0 tokens; .* takes 1 to 256"),
        ({"window": 257}, r"window is 257 tokens; .* takes 1 to 256"),
        ({"against": "/nowhere"}, "/nowhere: no such folder; give a bundle, or the folder of"),
    ],
)
def test_bad_input_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        evaluate(DEMO, **({"text": TEXT} | options))


def test_another_vocabulary_is_refused(tiny_bundle: Path) -> None:
    for other in (tiny_bundle, CHECKPOINT):
        with pytest.raises(InputError, match=r"tokens, .*demo_model has 1,756"):
            evaluate(DEMO, TEXT, against=other)
