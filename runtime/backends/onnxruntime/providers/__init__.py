"""Execution providers of onnxruntime: their names, libraries and devices, and sessions on them."""
