"""Edits, which make tokens use other table rows than their own: file format, alignment schemes.

stem_edge.apps.editing makes and compares edits; stem_edge.runtime.lookups applies edits to prompts.
"""
