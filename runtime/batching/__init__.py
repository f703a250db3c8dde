"""Several sequences in a step, which reads the backbone once for many tokens.

`Model.generate_many` submits requests to a Scheduler, which one thread steps. A step is one unit of
work: a token of each running sequence, or one chunk of the prompt at the front of the queue, in turns
if there are both. So no request waits longer than one chunk, and the rows of the next unit are known
and read while this one computes. A sequence that runs alone decodes as in `generate`, by the same
Decoding (runtime/decoding.py), until another one begins.

| file | has |
|---|---|
| batch.py | steps of a batch, in turn with all other callers of the engine |
| request.py | a prompt and its answer: what it holds from its first chunk to its last |
| lone.py | a sequence that runs alone, and what sequences take in memory |
| queue.py | what waits to begin |
| opening.py | the scheduler of a loaded model, and many prompts through a pump |
| scheduler.py | places, turns, memory and failures |
| pump.py | requests taken as places become free, and their chunks handed out; Ctrl-C between steps |

A prompt is computed in a separate context, as in `generate`, so kept prefixes serve it and its keys
and values have the same bits. Once it does not run alone, they are copied into the batch, or their
context joins (BackendBatch.copies). runtime/prefixes counts the memory of keys and values for all callers.
"""
