"""The command `measure`: time and memory of runs, each in a process of its own."""
