"""Execution providers of onnxruntime: which there are, how they start, sessions on them."""
