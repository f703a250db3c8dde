"""What tokens look up: edits in effect, where words stand in a prompt, row ids.

Reading the records that edits compose is in rows.
"""
