"""One layer of the backbone under construction: its tensors, and how its graph multiplies with them.

Heads are padded to what attention accepts, and tensors with them.
"""

from __future__ import annotations

from collections.abc import Sequence

from stem_edge.config import FFN_TERMS, Layer, ModelConfig
from stem_edge.graph.formats import MatrixKind
from stem_edge.graph.ir import CONTRIB, Graph
from stem_edge.graph.linear import Products, vector
from stem_edge.graph.names import SLOT_IDS, head_width
from stem_edge.tables.rows import RecordLayout

Shapes = dict[str, tuple[int, ...]]
NORM = "SimplifiedLayerNormalization"


class LayerGraph:
    """What attention and FFN need to emit themselves.

    layout: of the rows in their slots; a dense model has none.
    """

    def __init__(
        self,
        config: ModelConfig,
        layout: RecordLayout | None,
        products: Products,
        number: int,
        slot_ids: str = SLOT_IDS,
    ) -> None:
        self.config, self.layout, self.number = config, layout, number
        self.slot_ids = slot_ids  # [1, T] of the tokens' rows
        self.graph: Graph = products.graph
        self.at = f"layers.{number}."  # begins the name of everything in this layer
        self.kind, self.shape = config.ffn_kind(number), config.layer(number)
        self._products, self._shapes = products, layer_shapes(config, number)

    @property
    def takes_row(self) -> bool:
        """Whether the FFN's gate or up has the token's row in it."""
        return any("row" in terms for terms in FFN_TERMS[self.kind].values())

    @property
    def has_ffn_matrices(self) -> bool:
        """Whether a matrix multiplies what the FFN gets."""
        return any("matrix" in terms for terms in FFN_TERMS[self.kind].values())

    def product(self, name: str, kind: MatrixKind, x: str, matrices: Sequence[str]) -> str:
        """x [1, T, K] times the transpose of some matrices, stacked, plus their biases."""
        shapes = [self._shapes[name] for name in matrices]
        rows = sum(shape[0] for shape in shapes)
        parts = tuple(self.at + name for name in matrices)
        result = self._products.product(self.at + name, kind, x, parts, (rows, shapes[0][1]))
        if not any(n + ".bias" in self._shapes for n in matrices):
            return result
        biases = tuple(part + ".bias" for part in parts)
        joined = vector(self.graph, self._products.plan, result + ".bias", rows, biases)
        return self.graph.add("Add", [result, joined], result + ".biased")

    def rms_norm(self, name: str, x: str, part: str, eps: float) -> str:
        """RMS norm over the last axis, its weight a tensor of the layer."""
        (size,) = self._shapes[part]
        weight = vector(self.graph, self._products.plan, name, size, (self.at + part,))
        return norm(self.graph, x, weight, eps)

    def activated(self, gate: str, name: str) -> str:
        """What the model's activation makes of a gate."""
        if self.config.activation == "gelu":
            return self.graph.node("FastGelu", [gate], [self.at + name], CONTRIB)
        return self.graph.node("QuickGelu", [gate], [self.at + name], CONTRIB, alpha=1.0)

    def post_norm(self, name: str, x: str) -> str:
        """The norm after attention or FFN, in models that have one."""
        if not self.config.post_norms:
            return x
        return self.rms_norm(self.at + name, x, name, self.config.norm_eps)

    def scaled(self, residual: str, delta: str) -> str:
        """What the layer gives, times its own number."""
        name = self.at + "layer_scale"
        scale = vector(self.graph, self._products.plan, name, 1, (name,))
        total = self.graph.add("Add", [residual, delta], name + ".sum")
        return self.graph.add("Mul", [total, scale], name + ".out")

    def add_norm(self, name: str, residual: str, delta: str, consumer: str) -> tuple[str, str]:
        """RMS norm of residual + delta, and that sum.

        consumer: the product that gets the norm's result; empty if none does.
        """
        full, eps, (size,) = self.at + name, self.config.norm_eps, self._shapes[name]
        if consumer:
            weight = self._products.norm(full, size, self.at + consumer)
        else:
            weight = vector(self.graph, self._products.plan, full, size, (full,))
        if not delta:
            return norm(self.graph, residual, weight, eps), residual
        total = f"{full}.sum"
        normed = self.graph.node(
            "SkipSimplifiedLayerNormalization",
            [residual, delta, weight],
            [f"{full}.out", "", "", total],
            CONTRIB,
            epsilon=eps,
        )
        return normed, total


def norm(graph: Graph, x: str, weight: str, eps: float) -> str:
    """RMS norm over the last axis."""
    return graph.add(NORM, [x, weight], weight + ".out", axis=-1, epsilon=eps)


def plain_norm(graph: Graph, x: str, weight: str, result: str, eps: float) -> str:
    """The same with ONNX's own operators, in a form that onnxruntime knows for a norm."""
    squares = graph.add("Pow", [x, graph.float(2.0)], result + ".squares")
    mean = graph.add("ReduceMean", [squares, graph.sizes([-1])], result + ".mean", keepdims=1)
    moved = graph.add("Add", [mean, graph.float(eps)], result + ".moved")
    size = graph.add("Sqrt", [moved], result + ".size")
    normed = graph.add("Div", [x, size], result + ".normed")
    return graph.add("Mul", [normed, weight], result)


def layer_shapes(config: ModelConfig, layer: int) -> Shapes:
    """Name -> shape of a layer's tensors (ModelConfig.layer_shapes)."""
    described = config.layer(layer)
    return {n: _padded(described, n, s) for n, s in config.layer_shapes(layer).items()}


def backbone_shapes(config: ModelConfig) -> Shapes:
    """Name -> shape of all tensors (ModelConfig.backbone_shapes)."""
    shapes: Shapes = {}
    for name, shape in config.backbone_shapes().items():
        in_layer = name.startswith("layers.")
        shapes[name] = (
            _padded(config.layer(int(name.split(".")[1])), name, shape) if in_layer else shape
        )
    return shapes


def kind_of(name: str) -> MatrixKind:
    """Kind of a matrix by its tensor's name."""
    part = name.rsplit(".", 1)[-1]
    kind: MatrixKind = "qkv" if part in ("wq", "wk", "wv") else part  # type: ignore[assignment]
    return kind


def _padded(layer: Layer, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    width, part = head_width(layer), name.removesuffix(".bias").rsplit(".", 1)[-1]
    if part in ("wq", "wk", "wv", "q_norm", "k_norm"):
        return (shape[0] // layer.head_dim * width, *shape[1:])
    if part == "wo" and len(shape) == 2:
        return shape[0], shape[1] // layer.head_dim * width
    return shape
