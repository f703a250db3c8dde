"""The paths of the server, a file for each kind: what is asked, and what is answered."""
