"""Names of models on a hub, like hf:org/name, and the folders that they are fetched to.

This package knows files and revisions, but not bundles; stem_edge.bundle checks the fetched files.
"""

PREFIX = "hf:"  # of names of models on a hub
