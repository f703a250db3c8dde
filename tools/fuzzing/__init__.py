"""Fuzzing of whatever reads bytes that somebody else may have made: targets, seeds and their mutants.

`python tools/fuzz.py` is the command. Readers themselves are in the package, not here.
"""
