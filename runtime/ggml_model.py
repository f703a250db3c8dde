"""What all contexts of a loaded backbone share: the processor, weights, slots of the row cache."""

from __future__ import annotations

from stem_edge.config import ModelConfig
from stem_edge.ggml import Ggml
from stem_edge.ggml_types import TensorType
from stem_edge.gguf_tensors import GgufWeights
from stem_edge.quantize import U8
from stem_edge.runtime.ggml_graph import Arena, Memory, Processor, Tensor
from stem_edge.runtime.ggml_slots import BlockSlots
from stem_edge.runtime.ggml_weights import Weights


class GgmlModel:
    """A backbone.gguf, and rows to read.

    kv_type: F16 or F32, of keys and values. Raises BackendError.
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
        # STEM layer -> slots of each part of its rows
        self.slots: dict[int, list[Tensor]] = {}
        if slots is not None:
            count = len(slots.layout.layers) * len(slots.layout.parts)
            self._arena, self._memory = Arena(ggml, count), list[Memory]()
            for layer, parts in zip(slots.layout.layers, slots.rows, strict=True):
                shapes = zip(slots.layout.parts, parts, strict=True)
                self.slots[layer] = [self._placed(slots, *one) for one in shapes]

    def _placed(self, slots: BlockSlots, shape: tuple[int, ...], rows: U8) -> Tensor:
        """The slots of one part of a layer's rows, [..., count]."""
        memory = Memory(self.ggml, rows.reshape(-1))
        tensor = self._arena.tensor(slots.type, *reversed(shape), slots.count)
        memory.place(tensor)
        self._memory.append(memory)
        return tensor
