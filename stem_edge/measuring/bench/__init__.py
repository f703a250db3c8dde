"""Speed and memory of subjects, each in a process of its own, on the tokens of a text."""
