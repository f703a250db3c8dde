"""Builds the ONNX graphs of the backbone, which is the model without its lookup tables.

Exporter and runtime build the same graphs: the exporter writes each weight at the offset that the
layout determines, and the runtime runs graphs that read it there. Nothing here reads a file.
"""
