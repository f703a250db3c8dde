"""Numerics: block quantization, scale search, RoPE, divergence, and a reference model in numpy."""
