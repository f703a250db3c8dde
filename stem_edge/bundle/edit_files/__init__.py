"""Edit files: their format and paths, and the alignment schemes of the STEM paper.

stem_edge.apps.editing makes and compares edits; stem_edge.runtime.lookups applies edits to prompts.
"""
