"""HTTP paths of the server, one module for each kind."""
