"""Download of models from a hub: names like hf:org/name, files, and folders of the cache."""

PREFIX = "hf:"  # of names of models on a hub
