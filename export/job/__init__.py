"""State of one export: its recipe, its plan, its files and how they get their name.

The order of the steps is decided in export/exporter.py.
"""
