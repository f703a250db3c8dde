"""Batches: run every prompt of a file, and append each result to another file; resumable.

| file | contents |
|---|---|
| batch.py | `batch`, the public function |
| rows.py | reads the rows (JSON lines) of the input file |
| output.py | the result file, which also records the rows that are done |
| answering.py | answers rows with a loaded model |
| on_ray.py | answers rows on the machines of a Ray cluster |
"""
