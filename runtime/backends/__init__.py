"""Engines that run a backbone: the list of them, their interface, load options, the memory plan.

An engine is a folder in here, with its own loader, slots and needs, and an entry in engines.py.
"""
