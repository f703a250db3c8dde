"""Numbers: block quantization, the search for scales, RoPE, divergence, the model in plain numpy.

The reference model is the oracle of the tests. Nothing in here reads a file.
"""
