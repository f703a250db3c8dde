"""One export: its options, what it writes into, how a killed one goes on.

Who decides the order is export/exporter.py.
"""
