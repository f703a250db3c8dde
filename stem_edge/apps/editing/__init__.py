"""Knowledge editing: making edits, and describing them. Their files are in stem_edge.bundle.edit_files."""
