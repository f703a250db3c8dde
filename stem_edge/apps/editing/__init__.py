"""Knowledge editing: make and describe edits. Files of edits are in stem_edge.bundle.edit_files."""
