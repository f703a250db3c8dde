"""What the operating system gives: memory, child processes, the user's folders.

Nothing in here knows a model.
"""
