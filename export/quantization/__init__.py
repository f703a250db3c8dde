"""How codes of matrices are found, what a calibration text tells about them, what it cost.

Block quantization itself is in stem_edge/numerics.
"""
