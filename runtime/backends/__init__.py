"""What runs a backbone: the interface, options of loading, memory needs and plan, the list of engines.

An engine is a folder in here, with its own loader, slots and needs, and a line in engines.py.
"""
