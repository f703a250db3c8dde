"""The paths of the server, a file for each kind: its requests and answers."""
