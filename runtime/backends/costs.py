"""Costs of a backbone: the memory that its engine needs, measured step times, and step sizes."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from stem_edge.bundle.footprint import Footprint

# Fewest tokens in a chunk of a prompt: smaller chunks could leave a last chunk of one token.
LEAST_CHUNK = 4
DAMAGED = "the weights or rows may be damaged: run stem-edge verify, or copy the bundle again"
LESS_MEMORY = (
    "shorten the prompt, or load with a smaller context_length or less memory for the row cache"
)
SIZES = (2, 4, 8)  # tokens in decoding steps with drafts: measured, and then used
MOST = max(SIZES)  # tokens of the largest of these steps
BEFORE = 64  # tokens in the context before the steps that are measured
# Tokens of the shortest prompt that runs in the prefill graph. It is faster from 13 tokens on with SmolLM2-135M, from 8
# with a 1B model (docs/lab). The whole prompt decides, not the chunk, so that the chunk size changes no token.
PREFILL_FROM = 8


class StepCosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Measured times of decoding 1 to 8 tokens in one step, and whether a step's size changes a token's logits."""

    seconds: float  # time of a step of one token
    times: dict[int, float]  # tokens of a step -> its time as a multiple of `seconds`
    same_bits: bool  # steps of several tokens compute the bits of single-token steps
    same_in_batches: bool = False  # steps of several sequences compute these bits, too
    threads: int = 0  # number of threads in the measurement; 0: those of this process


@dataclass(frozen=True)
class Part:
    """Bytes that a backbone needs in the memory of this process, or of a device.

    fixed: activations that any step needs. chunk_token: further activations for each token of a
    prompt chunk. later: part of `weights`, taken when graphs are opened at first use.
    """

    weights: int  # without weights that are read in place from their file
    kv_cache: int  # of a full context
    fixed: int
    chunk_token: int
    logits: int  # further activations for each position with logits, if there are several
    later: int = 0

    def activations(self, chunk: int, sequences: int) -> int:
        """Return the bytes of activations for the larger of two steps: a prompt chunk, or a step of a batch.

        chunk: tokens of the prompt chunk. sequences: sequences of the batch, one token each.
        """
        step = sequences * (self.chunk_token + self.logits) if sequences > 1 else 0
        return self.fixed + max(chunk * self.chunk_token, step)


@dataclass(frozen=True)
class Needs:
    """Memory that a loaded backbone needs, and the settings that determine it.

    host: bytes in this process's memory. mapped: bytes of weights that each token reads in mapped
    files. shared: the device uses this process's memory. preparing: a text for users about the
    disk, memory and time that preparing takes; empty if nothing is left to prepare.
    """

    footprint: Footprint
    context_length: int
    host: Part
    device: Part | None = None  # on a device, which then holds weights, KV cache and activations
    device_limit: int | None = None  # bytes that may be taken there; None without a limit
    shared: bool = False
    provider: str = "cpu"  # onnxruntime's execution provider
    mapped: int = 0
    prefill: bool = False  # the graph for prompts is loaded, too
    preparing: str = ""

    @property
    def records(self) -> int:
        tables = self.footprint.tables
        return 0 if tables is None else tables.records

    def rows(self, tokens: int) -> int:
        """Most rows that a step reads, with older tokens' rows if rows are means over a window."""
        model = self.footprint.model
        return tokens * model.lookups + max(0, model.row_window - 1)
