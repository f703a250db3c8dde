"""Builds the ONNX graphs of the backbone, which is the model without its lookup tables.

Inputs are the model's description and the storage format of its weights. Modules contain the names of
inputs and outputs, the builders, the layout of weight files, and the encoder. Exporter and runtime
build the same graphs: the exporter writes each weight at the offset that the layout determines, and
the runtime runs graphs that read it there. Nothing here reads a file.
"""
