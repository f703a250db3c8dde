"""Load a bundle and generate tokens with it.

Imports numpy, onnxruntime, tokenizers and msgspec; never torch, onnx or zarr.
"""

from stem_edge.runtime.backends.memory_plan import MemoryPlan
from stem_edge.runtime.loading import load
from stem_edge.runtime.model import Model
from stem_edge.runtime.sampling_params import SamplingParams
from stem_edge.runtime.scheduling.request import Chunk

__all__ = ["Chunk", "MemoryPlan", "Model", "SamplingParams", "load"]
