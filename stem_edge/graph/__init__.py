"""Graphs of the backbone, built from the model's description and the format of its weights.

Here are the names of inputs and outputs, the builders, the plan of the weight files and the encoder
that makes ONNX of them. Exporter and runtime both build: the exporter writes weights where the plan
says they lie, the runtime opens graphs over them. Nothing here reads a graph, a weight or a bundle.
"""
