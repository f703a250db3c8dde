"""Knowledge editing: making edits, and looking at what they change. See stem_edge.edits.file."""
