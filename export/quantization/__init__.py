"""Quantizes matrices with the help of a calibration text, and measures the errors.

Block quantization itself is in stem_edge/numerics.
"""
