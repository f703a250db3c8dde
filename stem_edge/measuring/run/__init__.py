"""Subjects of a measurement, each in a process of its own, on the tokens of a text."""
