"""Numerics: block quantization, scale search, RoPE, divergence, and the model in plain numpy.

The reference model is the oracle of the tests. Nothing in here reads a file.
"""
