"""Quantizes matrices with the help of a calibration text, and measures the errors."""
