"""A one-line summary of a call's speeds and hit rates."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stem_edge.runtime.stats import GenerationStats


def line(stats: GenerationStats) -> str:
    where = f" on {stats.provider}" if stats.provider not in ("", "cpu") else ""
    engine = f"{stats.engine}{where}: " if stats.engine else ""
    elsewhere = cached = guessed = batch = ""
    if stats.cached_tokens:
        cached = f" ({stats.cached_tokens} kept)"
    if stats.drafted_tokens:
        guessed = f" ({stats.accepted_tokens} of {stats.drafted_tokens} guesses right)"
    if stats.sequences > 1:
        batch = f" ({stats.sequences} sequences, {stats.tokens_per_step:.1f} tokens a step)"
    if stats.network_reads:
        elsewhere = (
            f"{stats.network_bytes / 1e6:.2f} MB in {stats.network_reads} reads from the network, "
        )
    # The first token is counted with the prompt.
    speed = f" at {stats.decode_tokens_per_second:.1f}/s" if stats.new_tokens > 1 else ""
    rows = (
        f"; rows {stats.hit_rate:.0%} hits, {elsewhere}{stats.flash_bytes / 1e6:.2f} MB read from flash, "
        f"{stats.stall_seconds * 1000:.0f} ms stalled"
    )
    return (
        f"{engine}prompt {stats.prompt_tokens} tokens{cached} at {stats.prefill_tokens_per_second:.0f}/s, "
        f"new {stats.new_tokens}{speed}{guessed}{batch}, first after {stats.first_token_seconds * 1000:.0f} ms"
        f"{rows if stats.row_hits + stats.row_misses else ''}"
    )
