"""Plans for tables over a network: what is stated, and what follows from it."""

import pytest
from contract import refused
from installed import DEMO

from stem_edge.errors import InputError
from stem_edge.measuring.planning.fit import fit
from stem_edge.measuring.planning.network import Network, parse_network

GOOD = {
    ("20ms,100MB", None): Network(0.02, 1e8, 10**9),
    (" 1.5 s , 2MB/s ", "3MB"): Network(1.5, 2e6, 3 * 10**6),
    ("500us,1GB", 0): Network(0.0005, 1e9, 0),
}
BAD = ["20ms", "20,100MB", "100MB,20ms", "-1ms,100MB", "20ms,", "20ms,fast", "20ms,100Mbit", ""]


@pytest.mark.parametrize(("text", "tier"), GOOD)
def test_what_is_stated(text: str, tier: int | str | None) -> None:
    found = parse_network(text, tier)
    assert found is not None
    assert found == pytest.approx(GOOD[text, tier])


@pytest.mark.parametrize("text", BAD)
def test_what_cannot_be_meant(text: str) -> None:
    with pytest.raises(InputError, match=r"^network is .*; expected"):
        parse_network(text, None)


def test_a_tier_without_a_network() -> None:
    assert parse_network(None, None) is None
    refused(lambda: parse_network(None, "1GB"), InputError, "network is missing", "disk_tier")


def test_the_share_of_a_tier() -> None:
    def hits(slots: int) -> float:
        return min(1.0, slots / 100)

    for tier, slots, share in ((500, 20, 0.5 / 0.8), (0, 20, 0.0), (10**9, 20, 1.0), (5, 100, 0.0)):
        assert Network(0.02, 1e8, tier).tier_share(hits, slots, 10) == pytest.approx(share)


def test_a_slower_network_and_a_smaller_tier_are_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a row cache of a part of the records; they all have room beside larger memories."""
    where = "stem_edge.measuring.planning.target.process_nbytes"
    monkeypatch.setattr(where, lambda engine: 37_500_000)
    found = [
        fit(DEMO, "55MB", bandwidth="17GB", flash="ufs2", network=network, disk_tier=tier)[0]
        for network, tier in ((None, None), ("20ms,100MB", "100KB"), ("90ms,10MB", 0))
    ]
    near, tier, far = (one.prediction for one in found)
    assert near.decode_tokens_per_second > 1.5 * tier.decode_tokens_per_second
    assert tier.decode_tokens_per_second > 1.5 * far.decode_tokens_per_second
    assert (near.network_per_token, near.tier_hit_rate, far.tier_hit_rate) == (0, 0, 0)
    assert 0 < tier.network_per_token < far.network_per_token
    assert 0 < tier.tier_hit_rate < 1
