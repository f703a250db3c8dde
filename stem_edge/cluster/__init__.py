"""Batches, exports and evaluations on several machines, by Ray, which is imported here alone.

Other rooms say what the pieces of their work are; this one has them done elsewhere.

| file | has |
|---|---|
| connection.py | a connection to a cluster, or one of this machine alone; errors of Ray as ours |
| sharing.py | `share`: pieces of work to a process on each machine, and again if one is lost |
| memory.py | what a model on a machine takes |
| exports.py, evaluation.py, batches.py | what the pieces are: shards, windows of a text, rows |
"""
