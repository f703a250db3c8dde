"""Names of models on a hub, like hf:org/name, and the folders that they are fetched to.

Knows files and revisions, not what a bundle is; stem_edge.bundle checks what was fetched.
"""

PREFIX = "hf:"  # of names of models on a hub
