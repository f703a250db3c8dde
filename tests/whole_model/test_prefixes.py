"""Logits after a prompt that goes on from a kept one: those of a fresh call, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from architectures import VARIANTS
from conformance import CASES, CONFORMANCE
from exact_models import exact_stem
from installed import DEMO, bundle_for, export_ggml
from loading import load_fixed
from prefix_bits import after_prompt, check_bits
from prompt_graph import load_with
from tiers import GGML_IS_SLOW, slow_but

import stem_edge
from stem_edge.graph.formats import EngineName
from stem_edge.runtime.lookups.lookups import StemId

# Windows that drop tokens in prompts of this length, and prompts of several steps.
LONG = 420
MODELS: dict[str, dict[str, Any]] = {
    "stem": {},
    "window": {"sliding_window": 60, "window_layers": (0, 2)},
    "all at once": VARIANTS["all at once"],
    "hash-moe": VARIANTS["hash-moe"],
    "means of rows": VARIANTS["low rank, mix, means of rows"],
    "mixture of rows": VARIANTS["low rank, gate, mixture"],
    "Engram": VARIANTS["Engram"],
    "wide": {"dim": 192, "head_dim": 64, "n_heads": 4, "n_kv_heads": 1, "d_ff": 320},
}


def prompts(vocab_size: int, longest: int, count: int) -> list[list[int]]:
    """Draw prompts that begin alike: cut at any place, then others, and some of them twice."""
    rng = np.random.default_rng(0)
    base, drawn = rng.integers(3, vocab_size, longest).tolist(), list[list[int]]()
    for number in range(count):
        kept = int(rng.integers(0, longest if number % 3 else 30))
        more = int(rng.integers(1, min(8 if number % 2 else longest, longest - kept) + 1))
        drawn.append(base[:kept] + rng.integers(3, vocab_size, more).tolist())
        drawn += [drawn[-1]] * (number % 5 == 0) + [base[: kept + more]] * (number % 4 == 0)
    return drawn


@pytest.fixture(scope="module", params=slow_but(["window"], MODELS))
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    changes = {"max_context": 1024} | MODELS[request.param]
    return exact_stem(tmp_path_factory.mktemp("prefixes"), changes, tokens=4).path


@pytest.mark.parametrize("engine", GGML_IS_SLOW)
def test_bits_of_long_prompts(bundle: Path, engine: EngineName) -> None:
    if not bundle_for(bundle, engine).exists():
        pytest.skip(f"no backbone for {engine}")
    with load_fixed(bundle_for(bundle, engine), engine=engine) as model:
        drawn = prompts(model.config.vocab_size - 4, LONG, 24)
        assert check_bits(model, drawn) > sum(map(len, drawn)) // 10


@pytest.mark.parametrize("engine", GGML_IS_SLOW)
@pytest.mark.parametrize("case", slow_but(CASES[:1], CASES))
def test_bits_of_conformance_checkpoints(case: str, engine: EngineName, tmp_path: Path) -> None:
    out = stem_edge.export_bundle(CONFORMANCE / case, tmp_path / "b", type="fp32", rows="int8").path
    export_ggml(CONFORMANCE / case, out, rows="int8")
    # Few slots make short steps, so that there are several.
    with load_fixed(bundle_for(out, engine), engine=engine, slots=16) as model:
        longest = min(60, model.plan.context_length - 10)
        assert check_bits(model, prompts(250, longest, 16)) > 0


@pytest.mark.parametrize("prefill_graph", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize(
    "options",
    [
        {"slots": 64},
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"overlap": False, "threads": 1}, marks=pytest.mark.slow),
    ],
)
def test_bits_of_a_quantized_model(prefill_graph: bool, options: dict[str, Any]) -> None:
    with load_with(DEMO, prefill=prefill_graph, **options) as model:
        drawn = prompts(model.config.vocab_size, 200, 20)
        assert check_bits(model, drawn) > sum(map(len, drawn)) // 4


@pytest.mark.slow
@pytest.mark.parametrize("backbone", ["int8", "int4"])
@pytest.mark.parametrize("prefill_graph", [False, True])
def test_bits_of_every_cut(
    backbone: Any, prefill_graph: bool, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    stem_edge.export_bundle(tiny_checkpoint, tmp_path / "b", type=backbone, rows="int8")
    with load_with(tmp_path / "b", prefill=prefill_graph) as model:
        (base,) = prompts(300, 120, 1)[:1]
        base = [*base, *range(10, 110)][:100]
        drawn = [ids for cut in range(len(base)) for ids in (base, [*base[:cut], 5, 6, 7])]
        assert check_bits(model, drawn) > 0


@pytest.mark.parametrize("engine", GGML_IS_SLOW)
def test_other_rows_are_not_taken_over(tiny: Path, engine: EngineName) -> None:
    ids = [(7 * place) % 290 + 3 for place in range(40)]
    others: list[Sequence[StemId]] = [
        [*ids[:17], 3, *ids[18:]],
        [[token, 4] for token in ids],
        ids[:16] + ids[:24],
    ]
    with load_fixed(tiny, engine=engine, slots=16) as model:
        for stem_ids in (None, *others, None, *reversed(others)):
            expected = after_prompt(model, ids, stem_ids, fresh=True).logits
            for _ in range(2):
                assert (after_prompt(model, ids, stem_ids).logits == expected).all()
        after_prompt(model, ids)
        assert after_prompt(model, ids).cached
