"""Rows on disk: how they are packed into records, and records into shards.

What reads them while a model runs is in runtime/rows; what writes them, in export/tables.
"""
