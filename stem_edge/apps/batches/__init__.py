"""Batches: run every prompt in a file and append a result line for each; resumable.

| file | has |
|---|---|
| batch.py | `batch`: a file of prompts to a file of results |
| rows.py | the rows of a file, and their results |
| output.py | the file of results, which is the only state |
| answering.py | rows to results with a loaded model |
| on_ray.py | rows to results on the machines of a Ray cluster |
"""
