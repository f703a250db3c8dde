"""State of one export: its options, its files, and the journal that lets a killed one go on.

The order of the steps is decided in export/exporter.py.
"""
