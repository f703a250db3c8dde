"""Operating system: memory, child processes, the user's folders.

Nothing in here knows about models.
"""
