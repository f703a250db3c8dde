"""Writers of backbones, for onnxruntime and for ggml.

The tensors of a backbone are defined in stem_edge/graph and stem_edge/ggml.
"""
