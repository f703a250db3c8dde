"""Knowledge editing: make and describe edits. stem_edge.bundle.edit_files reads and writes them."""
