"""A bundle that is new on this machine: its trial in a child process, and whether it is safe."""
