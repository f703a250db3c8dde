"""The first load of a bundle on a machine: its trial in a child process, and the safety check."""
