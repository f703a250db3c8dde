"""Graphs for accelerators: the decoding graphs, in operators of the ONNX standard only.

They compute the same over the same weights. B is 1, and layers with a window keep the whole context. These
inputs and outputs differ:

| input or output on accelerators | type, shape | meaning |
|---|---|---|
| rope_cos, rope_sin, rope_cos.1 ... | float32 [T, head_width/2] | angles at the step's positions; in rest at the wanted ones, T is n |
| places | int64 [T, 1] | early and late: positions of the step's tokens |
| mask.<w> | float32 [T, P]; in rest [n, P] | added to the scores of the first P tokens: 0 or MASKED. One input for each window width w in the model; w is 0 for layers without a window |
| keys.<l>, values.<l> | float32 [P, kv heads * head_width] | first P lines of the KV cache; outputs new_keys.<l>, new_values.<l> of layers that borrow none are in the same memory |
| slot_ids | int64 [1, T] | in rest [1, n], of the wanted tokens: slots hold the rows of a step alone |
"""

PLACES = "places"
MASKED = -1e9  # added to a score, so that its weight after the softmax is 0


def mask_name(window: int) -> str:
    """Return the name of the mask input for layers with this window."""
    return f"mask.{window}"
