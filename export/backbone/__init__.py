"""Writers of backbones, for onnxruntime and for ggml.

Which tensors there are follows from stem_edge/graph and stem_edge/ggml.
"""
