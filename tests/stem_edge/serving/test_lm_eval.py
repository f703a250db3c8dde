"""lm-evaluation-harness over HTTP: the scores of the plug-in in process, to the digit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from installed import DEMO
from servers import serving

from stem_edge.serving import app

pytest.importorskip("lm_eval")
pytest.importorskip("tenacity")

from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model

from stem_edge.measuring.quality.lm_eval import StemEdgeLM

pytestmark = pytest.mark.slow
TEXTS = ("The capital of Peru is Lima. It is a country in South America.", "Spain borders France.")
PAIRS = [
    (f"The capital of {country} is", f" {capital}")
    for country in ("Peru", "Kenya", "Japan")
    for capital in ("Lima", "Nairobi", "Tokyo")
]


@pytest.fixture(scope="module")
def inside() -> Iterator[StemEdgeLM]:
    with StemEdgeLM(DEMO) as inside:
        inside.model.generate_text(
            list(range(5, 200)), max_new_tokens=9
        )  # which starts its threads
        yield inside


@pytest.fixture(scope="module")
def url(inside: StemEdgeLM) -> Iterator[str]:
    with serving(app(inside.model)) as url:
        yield url


def remote(url: str, inside: StemEdgeLM, *, add_bos_token: bool) -> Any:
    """Return the harness's own client."""
    return get_model("local-completions")(
        base_url=f"{url}/v1/completions",
        model="demo",
        tokenizer_backend="huggingface",
        tokenizer=str(DEMO),
        max_length=inside.max_length,
        add_bos_token=add_bos_token,
        batch_size=4,
    )


def asked(kind: Any, *arguments: tuple[Any, ...]) -> list[Instance]:
    return [Instance(kind, {}, one, number) for number, one in enumerate(arguments)]


def test_choices(url: str, inside: StemEdgeLM) -> None:
    other, requests = remote(url, inside, add_bos_token=True), asked("loglikelihood", *PAIRS)
    expected = inside.loglikelihood(requests, disable_tqdm=True)
    assert other.loglikelihood(requests, disable_tqdm=True) == expected
    assert any(greedy for _, greedy in expected)


def test_texts(url: str, inside: StemEdgeLM) -> None:
    # The harness puts its own begin token before these.
    other = remote(url, inside, add_bos_token=False)
    requests = asked("loglikelihood_rolling", *((text,) for text in TEXTS))
    expected = inside.loglikelihood_rolling(requests, disable_tqdm=True)
    assert other.loglikelihood_rolling(requests, disable_tqdm=True) == expected


def test_answers(url: str, inside: StemEdgeLM) -> None:
    options = {"until": ["."], "max_gen_toks": 12, "do_sample": False}
    requests = asked("generate_until", *((context, options) for context, _ in PAIRS[::3]))
    expected = inside.generate_until(requests, disable_tqdm=True)
    other = remote(url, inside, add_bos_token=True)
    assert (
        other.generate_until(requests, disable_tqdm=True)
        == expected
        == [" Lima", " Nairobi", " Tokyo"]
    )
