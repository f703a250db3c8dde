"""Several sequences in a step: what reads the backbone once for many tokens.

`Model.generate_many` submits requests to a Scheduler, which one thread steps. A step is one unit of
work: a token of each running sequence, or one chunk of the prompt at the front of the queue, in turns
where there are both. So no request waits longer than one chunk, and which rows the next unit needs is
known one ahead: they are read while this one computes. A sequence that runs alone decodes as in
`generate`, by the same Decoding (runtime/decoding.py), until another one begins.

| file | has |
|---|---|
| batch.py | steps of a batch, in turn with all other callers of the engine |
| request.py | a prompt and its answer: what it holds from its first chunk to its last |
| lone.py | a sequence that runs alone, and what sequences take in memory |
| queue.py | what waits to begin |
| opening.py | the scheduler of a loaded model, and many prompts through a pump |
| scheduler.py | places, turns, memory and failures |
| pump.py | requests taken as places become free, and their chunks handed out; Ctrl-C between steps |

A prompt is computed in a context of its own, as `generate` computes it, so kept prefixes serve it and
its keys and values have the same bits. They are copied into the batch, or their context joins, once
it does not run alone (BackendBatch.copies). A device's batch has taken the memory of all its places
before (BackendBatch.fixed_nbytes). Memory of keys and values is counted by runtime/prefixes
for all callers.
"""
