"""Measurements of bundles: time, memory, cost and quality."""
