"""One subject in a process of its own, on the tokens of a text."""
