"""The one place where speeds and hit rates are computed; command, demo and tools print the same."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass
class GenerationStats:
    """What one call of generate or logits did and took. Times in seconds."""

    prompt_tokens: int = 0
    new_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0  # of the steps after the first token
    first_token_seconds: float = 0.0  # from the call to the first token
    row_hits: int = 0  # tokens whose record was in the row cache when a step wanted it
    row_misses: int = 0
    flash_bytes: int = 0  # of records, read from the table store
    stall_seconds: float = 0.0  # waiting for those reads
    engine: str = ""  # that computed this

    @property
    def prefill_tokens_per_second(self) -> float:
        """Prompt tokens a second."""
        return self.prompt_tokens / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_tokens_per_second(self) -> float:
        """New tokens a second, the first one (which the prompt gives) left out."""
        return (self.new_tokens - 1) / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def hit_rate(self) -> float:
        """Share of row uses that found their record in the row cache."""
        uses = self.row_hits + self.row_misses
        return self.row_hits / uses if uses else 0.0

    def to_dict(self) -> dict[str, float | str]:
        """All figures, for JSON."""
        return asdict(self) | {
            "prefill_tokens_per_second": self.prefill_tokens_per_second,
            "decode_tokens_per_second": self.decode_tokens_per_second,
            "hit_rate": self.hit_rate,
        }

    def line(self) -> str:
        """One line for people."""
        engine = f"{self.engine}: " if self.engine else ""
        return (
            f"{engine}prompt {self.prompt_tokens} tokens at {self.prefill_tokens_per_second:.0f}/s, "
            f"new {self.new_tokens} at {self.decode_tokens_per_second:.1f}/s, "
            f"first after {self.first_token_seconds * 1000:.0f} ms; "
            f"rows {self.hit_rate:.0%} hits, {self.flash_bytes / 1e6:.2f} MB read from flash, "
            f"{self.stall_seconds * 1000:.0f} ms stalled"
        )
