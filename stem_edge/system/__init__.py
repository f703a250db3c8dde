"""Operating system: memory, page cache, processor and child processes.

Nothing in this package knows about models.
"""
