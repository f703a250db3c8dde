"""Rounds of one subject (measure) or of several that take turns (bench): figures, tables, plots."""
