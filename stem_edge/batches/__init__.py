"""Many prompts from a file, answered into another: each row once, whatever is interrupted.

| file | has |
|---|---|
| batch.py | `batch`: a file to a file |
| rows.py, reading.py | `Row` and `Result`, and the rows of a file |
| output.py | the file of results, which is the only state |
| keys.py | the ids that are done, in few bytes |
| run.py, tasks.py | `answer`: rows to results on one machine, by the runtime's batching |
| settings.py | what holds for all rows; `Answers`, what computes them |
| meter.py | progress |

Rows and results are in OpenAI's batch form or plain; what computes is `answer`, or machines of
stem_edge.cluster, which give the same results.
"""
