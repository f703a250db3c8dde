"""Writes the backbone of a bundle, for onnxruntime or for ggml.

stem_edge/graph and stem_edge/ggml define which tensors a backbone has.
"""
