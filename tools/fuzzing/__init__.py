"""Targets, seeds and mutants of `python tools/fuzz.py`. The readers under test are in the package."""
