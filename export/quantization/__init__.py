"""Quantizers of matrices, the calibration text that guides them, and the errors they make.

Block quantization itself is in stem_edge/numerics.
"""
