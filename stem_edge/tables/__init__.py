"""Tables on disk: rows packed into records, records into shards, and a token -> record index.

The reader for running models is in runtime/rows, the writer in export/tables.py.
"""
