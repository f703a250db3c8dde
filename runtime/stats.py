"""Speeds and hit rates, computed in one place so that all commands print the same numbers."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass

from stem_edge.runtime.rows.rows import Rows

# Metrics that are computed from other metrics.
DERIVED = ("prefill_tokens_per_second", "decode_tokens_per_second", "tokens_per_step",
           "flash_bytes_per_token", "hit_rate")  # fmt: skip
# Field of RowCounters -> field of GenerationStats, where the names differ.
STATS_OF = {"hits": "row_hits", "misses": "row_misses", "bytes_read": "flash_bytes"}


@dataclass
class GenerationStats:
    """Metrics of one call of generate, generate_many or logits. Times in seconds.

    misses = records read; hits + misses = tokens. Sequences that decode together share reads, so
    misses per token fall.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0  # tokens of the prompt from the prefix cache
    new_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0  # steps after the first token
    sequences: int = 0  # sequences whose prompt was computed
    decode_steps: int = 0
    drafted_tokens: int = 0  # drafts that steps verified
    accepted_tokens: int = 0  # drafts that were right
    first_token_seconds: float = 0.0  # from the call to the first token
    row_hits: int = 0  # uses of records that were in the row cache when a step needed them
    row_misses: int = 0  # records that a step had to read
    flash_bytes: int = 0  # records read from the table store
    stall_seconds: float = 0.0  # time that steps waited for records
    engine: str = ""
    provider: str = ""  # execution provider of onnxruntime
    network_bytes: int = 0  # read from remote tables
    network_reads: int = 0  # requests for remote tables

    @property
    def prefill_tokens_per_second(self) -> float:
        """Prompt tokens computed per second of prefill."""
        computed = self.prompt_tokens - self.cached_tokens
        return computed / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_tokens_per_second(self) -> float:
        """New tokens per second of decode steps."""
        return self.decoded_tokens / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def decoded_tokens(self) -> int:
        """New tokens except the first of each sequence, whose logits come from the prompt."""
        return self.new_tokens - max(1, self.sequences)

    @property
    def tokens_per_step(self) -> float:
        """Mean number of new tokens per decode step."""
        return self.decoded_tokens / self.decode_steps if self.decode_steps else 0.0

    @property
    def flash_bytes_per_token(self) -> float:
        """Bytes read from flash per processed token."""
        tokens = self.row_hits + self.row_misses
        return self.flash_bytes / tokens if tokens else 0.0

    @property
    def hit_rate(self) -> float:
        """Fraction of tokens whose record needed no read."""
        uses = self.row_hits + self.row_misses
        return self.row_hits / uses if uses else 0.0

    def to_dict(self) -> dict[str, float | str]:
        """Return all metrics as a dict for JSON."""
        return asdict(self) | {name: getattr(self, name) for name in DERIVED}

    def line(self) -> str:
        """Return a one-line summary for people."""
        from stem_edge.runtime.stats_line import line  # only for callers that show it

        return line(self)


class Recorder:
    """Updates `stats` during one call: tokens, times, counters of row cache and table store."""

    def __init__(self, stats: GenerationStats, rows: Rows) -> None:
        self._stats, self._rows = stats, rows
        self._started = time.perf_counter()
        self._before = rows.counters()

    def prefilled(self, tokens: int, cached: int, seconds: float) -> None:
        """Record the end of a prompt, whose first `cached` tokens came from the prefix cache."""
        self._stats.sequences += 1
        self._stats.prompt_tokens += tokens
        self._stats.cached_tokens += cached
        self._stats.prefill_seconds += seconds
        self.update()

    def sampled(self, *, drafted: bool = False) -> None:
        """Record a chosen token. drafted: True if a draft predicted it."""
        self._stats.new_tokens += 1
        self._stats.accepted_tokens += drafted
        if self._stats.new_tokens == 1:
            self._stats.first_token_seconds = time.perf_counter() - self._started

    def decoded(self, seconds: float, *, steps: int = 1, drafted: int = 0) -> None:
        """Record the end of decode steps. drafted: number of drafts in them."""
        self._stats.decode_seconds += seconds
        self._stats.decode_steps += steps
        self._stats.drafted_tokens += drafted

    def update(self) -> None:
        """Copy the counters of row cache and table store to `stats`."""
        before = vars(self._before)
        for name, count in vars(self._rows.counters()).items():
            setattr(self._stats, STATS_OF.get(name, name), count - before[name])
