"""Graphs of the backbone, built from the model's description and the format of its weights.

This package has the names of inputs and outputs, the builders, the layout of the weight files and
the encoder that turns graphs into ONNX. Exporter and runtime build the same graphs: the exporter
writes each weight at the offset that the layout determines, and the runtime opens graphs over that
file. Nothing here reads a graph, a weight or a bundle.
"""
