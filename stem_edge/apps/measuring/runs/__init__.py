"""Time and memory of runs, each in a process of its own: the command measure."""
