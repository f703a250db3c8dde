"""Many prompts from a file, answered into another: each row once, whatever is interrupted.

Rows and results are in OpenAI's batch form or plain; what computes is the runtime's batching, or
machines of stem_edge.cluster.
"""
