"""Writes the backbone of a bundle, for onnxruntime or for ggml."""
