"""Parts of tools/fuzz.py: targets, mutants of files, and the loop that runs inputs."""
