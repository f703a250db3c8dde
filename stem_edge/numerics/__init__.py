"""Numerics: block quantization, scale search, RoPE, divergence, and a reference model in numpy.

Tests compare results with the reference model. Nothing in this package reads a file.
"""
