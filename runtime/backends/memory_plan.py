"""The memory plan: the memory that a model will take, and the row cache slots that fit beside it.

A backend states its Needs: bytes in any case, per token of a chunk and per slot, in memory of this
process and of a device, if there is one. The planner (planner.py) takes the largest chunk that leaves
room for a useful row cache, then as many slots as fit.

It counts the anonymous memory of this process with one generation, or as many sequences at a time as
asked for, each with a full context, because the system cannot reclaim that: what is taken already,
and what loading and generating will add. Weights that are read in place from their files do not
count.
"""

from __future__ import annotations

from dataclasses import dataclass

from stem_edge.bundle.footprint import Footprint
from stem_edge.graph.formats import EngineName
from stem_edge.graph.kv import KvType
from stem_edge.graph.names import STEP_TOKENS
from stem_edge.units import format_size

# Prompt tokens in a step. Products reach full speed at about this many; more only take memory.
CHUNK_TOKENS = STEP_TOKENS
# For each token of a context, while a prompt becomes ids: about 4 bytes of text, of TextCodec.TEXT_NBYTES each.
PROMPT_NBYTES = 2_000


@dataclass(frozen=True)
class Part:
    """Bytes that a backbone needs in the memory of this process, or of a device."""

    weights: int  # without those read in place from their file
    kv_cache: int  # of a full context
    fixed: int  # activations of any chunk
    chunk_token: int  # further activations, for each token of a chunk
    logits: int  # further, for each position with logits, if more than one
    slot: int  # of the row cache


@dataclass(frozen=True)
class DeviceNeeds:
    """Needs on a device that holds weights, KV cache, activations and slots."""

    needs: Part
    limit: int | None  # bytes that may be taken; None without a limit
    shared: bool  # has no memory itself, so it takes this process's memory


@dataclass(frozen=True)
class Preparing:
    """What a first load takes once, in a separate process, to prepare a backbone."""

    disk: int  # bytes, which stay in the cache folder
    memory: int  # bytes
    seconds: int  # on two cores of a server processor

    def __str__(self) -> str:
        disk, memory = format_size(self.disk), format_size(self.memory)
        return f"{disk} on disk, {memory} of memory in a process of its own, about {self.seconds} s"


@dataclass(frozen=True)
class Needs:
    """Memory that a loader needs for its backbone, and the choices that it follows from."""

    footprint: Footprint
    context_length: int
    host: Part
    device: DeviceNeeds | None = None
    provider: str = "cpu"  # onnxruntime's execution provider
    prepared: bool = False  # weights stay in files that were packed beforehand
    prefill: bool = False  # the graph for prompts is loaded, too
    prefill_refused: str = ""  # why it is not loaded, if something bars it
    repack: bool = False  # weights are rearranged in memory
    preparing: Preparing | None = None  # what is still to be done for that
    saving: str = ""  # advice on needing less, which ends a sentence


@dataclass(frozen=True)
class Ask:
    """A user's wishes for a plan; None leaves the number to the planner."""

    memory: int | str | None = None  # limit for this process
    slots: int | None = None
    sequences: int = 1  # at a time, each with a full context


@dataclass(frozen=True)
class DevicePlan:
    """Planned bytes in the memory of a device, and the numbers that they follow from."""

    provider: str
    limit: int | None
    shared: bool
    context_length: int
    chunk_tokens: int
    slots: int
    weights: int
    kv_cache: int
    activations: int
    row_cache: int
    kv: KvType = "fp32"  # type of keys and values
    sequences: int = 1  # that the KV cache has room for

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(nbytes for _, nbytes in self.parts())

    def parts(self) -> list[tuple[str, int]]:
        """Name and bytes of each part."""
        return [
            ("weights", self.weights),
            (_kv_name(self), self.kv_cache),
            (f"activations of {self.chunk_tokens} tokens", self.activations),
            (f"row cache of {self.slots} slots", self.row_cache),
        ]


@dataclass(frozen=True)
class MemoryPlan:
    """Planned bytes in the memory of this process, and the numbers that they follow from."""

    engine: EngineName  # that runs the backbone
    context_length: int  # tokens of prompt and answer together
    chunk_tokens: int  # most tokens of a prompt in a step
    logit_tokens: int  # most tokens of a step that gives the logits of each
    slots: int  # records that the row cache holds
    process: int  # taken before loading
    weights: int  # matrices that the engine copies into its own memory, and its bookkeeping
    kv_cache: int  # of full contexts; the system provides its pages as they fill
    activations: int  # of a chunk
    reads: int  # records on their way from flash
    row_cache: int  # with slots on a device: their bookkeeping
    provider: str = "cpu"  # onnxruntime's execution provider
    device: DevicePlan | None = None  # of its memory
    prefill: bool = False  # the graph for prompts is loaded, too
    prefill_refused: str = ""  # why it is not, if something bars it
    kv: KvType = "fp32"  # type of keys and values
    sequences: int = 1  # that the KV cache has room for
    preparing: Preparing | None = None  # by the first load; None: it is done, or not wanted

    @property
    def kv_nbytes(self) -> int:
        """Bytes of keys and values, here or on the device."""
        return self.kv_cache if self.device is None else self.device.kv_cache

    @property
    def text(self) -> int:
        """Bytes for a prompt on its way to ids; one at a time is."""
        return PROMPT_NBYTES * self.context_length

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(nbytes for _, nbytes in self.parts())

    def parts(self) -> list[tuple[str, int]]:
        """Name and bytes of each part."""
        process = [("this process before loading", self.process), ("text of a prompt", self.text)]
        parts = [
            ("weights", self.weights),
            (_kv_name(self), self.kv_cache),
            (f"activations of {self.chunk_tokens} tokens", self.activations),
            ("reads", self.reads),
        ]
        if self.device is None:
            return [*process, *parts, (f"row cache of {self.slots} slots", self.row_cache)]
        shared = [("memory of the device", self.device.total)] if self.device.shared else []
        return [*process, *parts[2:], ("bookkeeping of the row cache", self.row_cache), *shared]


def _kv_name(plan: MemoryPlan | DevicePlan) -> str:
    times = f"{plan.sequences} x " if plan.sequences > 1 else ""
    return f"{plan.kv} KV cache of {times}{plan.context_length} tokens"
