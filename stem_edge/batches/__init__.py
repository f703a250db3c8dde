"""Many prompts from a file, answered into another: each row once, whatever is interrupted.

| file | has |
|---|---|
| rows.py | `Row`, and the rows of a file |
| results.py | `Result`, and the file of results, which is the only state |
| keys.py | the ids that are done, in few bytes |
| run.py | `answer`: rows to results on one machine, by the runtime's batching |
| batch.py | `batch`: a file to a file |

Rows and results are in OpenAI's batch form or plain; what computes is `answer`, or machines of
stem_edge.cluster, which give the same results.
"""
