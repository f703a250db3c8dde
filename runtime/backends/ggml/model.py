"""A loaded backbone.gguf: its weights, and the slots that its rows are read from."""

from __future__ import annotations

from stem_edge.config import ModelConfig
from stem_edge.ggml.gguf_tensors import GgufWeights
from stem_edge.ggml.library import Ggml
from stem_edge.ggml.types import TensorType
from stem_edge.numerics.quantize import U8
from stem_edge.runtime.backends.ggml.graph import Arena, Memory, Processor, Tensor
from stem_edge.runtime.backends.ggml.slots import BlockSlots
from stem_edge.runtime.backends.ggml.weights import Weights


class GgmlModel:
    """A loaded backbone.gguf and the slots that its rows are read from.

    kv_type: of keys and values, one of gguf_schema.KV_TENSORS. Raises BackendError.
    """

    def __init__(
        self,
        ggml: Ggml,
        config: ModelConfig,
        file: GgufWeights,
        slots: BlockSlots | None,
        threads: int,
        kv_type: TensorType,
        *,
        repack: bool = False,
    ) -> None:
        self.ggml, self.config, self.kv_type = ggml, config, kv_type
        self.processor = Processor(ggml, threads)
        self.weights = Weights(ggml, config, file, repack=repack)
        self.slots: dict[int, list[Tensor]] = {}  # STEM layer -> slots of each part of its rows
        if slots is not None:
            count = len(slots.layout.layers) * len(slots.layout.parts)
            self._arena, self._memory = Arena(ggml, count), list[Memory]()
            for layer, parts in zip(slots.layout.layers, slots.rows, strict=True):
                shapes = zip(slots.layout.parts, parts, strict=True)
                self.slots[layer] = [self._placed(slots, *part) for part in shapes]

    def _placed(self, slots: BlockSlots, shape: tuple[int, ...], rows: U8) -> Tensor:
        """Return a tensor [..., count] over the slots of a part of a layer's rows."""
        memory = Memory(self.ggml, rows.reshape(-1))
        tensor = self._arena.tensor(slots.type, *reversed(shape), slots.count)
        memory.place(tensor)
        self._memory.append(memory)
        return tensor
