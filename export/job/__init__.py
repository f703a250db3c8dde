"""State of one export: its options, its files, and the journal by which a killed one continues.

The order of the steps is decided in export/exporter.py.
"""
