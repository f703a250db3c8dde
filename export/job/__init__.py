"""State of one export: its options, its storage, its files and how they get their name.

The order of the steps is decided in export/exporter.py.
"""
