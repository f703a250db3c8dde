"""Graphs for accelerators: the decoding graphs, in operators of the ONNX standard only.

They compute the same from the same weight file. B is 1, and the KV cache of layers with an attention window
holds the whole context, too. stem_edge.graph.names lists graphs, inputs and outputs. Only these differ:

| input or output on accelerators | type, shape | meaning |
|---|---|---|
| rope_cos, rope_sin, rope_cos.1 ... | float32 [T, head_width/2] | cosines and sines at the step's positions; in graph rest [n, ...], only of the n tokens whose logits are requested |
| places | int64 [T, 1] | graphs early and late only: positions of the step's tokens |
| mask.<w> | float32 [T, P]; in graph rest [n, P] | added to the scores of the first P tokens: 0 or MASKED. One input for each window width w in the model; w is 0 for layers without a window |
| keys.<l>, values.<l> | float32 [P, kv heads * head_width] | first P rows of the KV cache; layers with their own K and V have outputs new_keys.<l>, new_values.<l> in the same memory |
| slot_ids | int64 [1, T] | slots of the tokens' rows; in graph rest [1, n], only of the n tokens whose logits are requested. Slots hold only the rows of the current step |
"""

PLACES = "places"
MASKED = -1e9  # added to a score, so that its weight after the softmax is 0


def mask_name(window: int) -> str:
    """Return the name of the mask input for layers with a window of this many tokens (0: none)."""
    return f"mask.{window}"
