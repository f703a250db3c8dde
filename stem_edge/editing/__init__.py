"""Knowledge editing: making, listing, explaining and comparing edits.

Their files are in stem_edge.edit_files; commands/bundles/edit.py prints what is computed here.
"""
