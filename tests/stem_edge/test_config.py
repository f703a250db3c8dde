"""ModelConfig: derived sizes, and descriptions that are refused."""

import pytest
from configs import config

from stem_edge.config_check import RANGES
from stem_edge.layers import LayerKind
from stem_edge.limits import MAX_HEADS, MAX_VOCAB, MAX_WIDTH

SUMMED = ("row_experts", "row_window")  # fields of models that add rows up
HASHED = {"stem_layers": (1,), "stem_ffn": "hash-moe", "n_experts": 2}
LARGEST = {field: most for field, (least, most) in RANGES.items() if least == 1}


@pytest.mark.parametrize("field", LARGEST)
def test_numbers_out_of_range(field: str) -> None:
    for value in (0, -1, LARGEST[field] + 1, 10**30):
        with pytest.raises(ValueError, match=f"{field} is {value}; expected 1 to {LARGEST[field]}"):
            config(**{field: value})


@pytest.mark.parametrize("field", LARGEST)
def test_the_largest_number_is_accepted(field: str) -> None:
    heads = {"n_kv_heads": {"n_heads": MAX_HEADS}, "head_dim": {"n_heads": 1, "n_kv_heads": 1}}
    found = config(**{field: LARGEST[field], **heads.get(field, {})})
    assert getattr(found, field) == LARGEST[field]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"n_heads": 4, "n_kv_heads": 3}, "n_heads 4 is not a multiple of n_kv_heads 3"),
        ({"n_heads": 1, "n_kv_heads": 2}, "n_heads 1 is not a multiple of n_kv_heads 2"),
        ({"head_dim": 3}, "head_dim 3 is odd"),
        ({"head_dim": MAX_WIDTH}, f"n_heads 2 times head_dim {MAX_WIDTH} is above {MAX_WIDTH}"),
        *[({"norm_eps": eps}, "norm_eps") for eps in (0.0, -1e-5, 1.0, float("nan"))],
        *[({"rope_theta": t}, "rope_theta") for t in (0.0, -1.0, float("inf"), float("nan"))],
        ({"vocab_size": MAX_VOCAB, "dim": MAX_WIDTH}, "parameters; expected at most 1099511627776"),
        *[({"logit_softcap": cap}, "logit_softcap") for cap in (-1.0, 1e-40, 1e300, float("nan"))],
        ({"stem_layers": (1, 0)}, "not ascending without repeats"),
        ({"stem_layers": (1, 1)}, "not ascending without repeats"),
        ({"stem_layers": (-1, 1)}, "outside the 2 layers"),
        ({"stem_layers": (1, 2)}, "outside the 2 layers"),
        ({"bos_id": -1}, "special token id -1 is outside the vocab_size 10"),
        ({"bos_id": 10}, "special token id 10 is outside the vocab_size 10"),
        ({"eos_ids": (9, 10)}, "special token id 10 is outside the vocab_size 10"),
        ({"placeholders": {"an image": -1}}, "special token id -1 is outside the vocab_size 10"),
        ({"layer_kinds": (LayerKind(layers=(2,), d_ff=8),)}, "outside the 2 layers"),
        ({"layer_kinds": (LayerKind(layers=(1,), head_dim=3),)}, "head_dim 3 is odd"),
        ({"layer_kinds": (LayerKind(layers=(1,), d_ff=-8),)}, "d_ff"),
        ({"layer_kinds": (LayerKind(layers=(1,), d_ff=8),), "stem_layers": (1,)}, "rows have one"),
        ({"borrowed_kv_layers": 2}, "borrowed_kv_layers is 2 of 2 layers"),
        (
            {"borrowed_kv_layers": 1, "layer_kinds": (LayerKind(layers=(0,), head_dim=8),)},
            "no layer before it has its kind",
        ),
        ({"stem_ffn": "ple", "stem_layers": (0, 1)}, "ple_width is 0"),
        ({"stem_ffn": "ple", "stem_layers": (1,), "ple_width": 4}, "expected all 2 layers"),
        ({"ple_width": 4}, "ple_width is 4"),
        ({"v_norm": True}, "v_norm needs the epsilon"),
        ({"embedding_scale": 0.0}, "embedding_scale is 0.0"),
        ({"attention_scale": float("nan")}, "attention_scale is nan"),
        ({"activation": "relu"}, "activation is 'relu'"),
        *[({"streams": n}, f"active_stream is 0 and streams {n};") for n in (-1, 0, 9, 10**30)],
        ({"streams": 4, "active_stream": 4}, "active_stream is 4 and streams 4"),
        ({"streams": 4, "active_stream": -1}, "active_stream is -1"),
        ({"streams": 2, "layer_scale": True}, "layer_scale in a model with 2 streams"),
        ({"ple_gate_scale": True}, "ple_gate_scale needs several streams"),
        ({"streams": 2, "ple_gate_scale": True}, "ple_gate_scale needs several streams"),
        *[({"row_experts": n, "stem_layers": (1,)}, f"row_experts is {n}") for n in (-1, 1, 65)],
        *[({"row_window": n, "stem_layers": (1,)}, f"row_window is {n}") for n in (-1, 1, 257)],
        *[({n: 4, "stem_layers": ()}, f"{n} is 4 with stem_ffn stem and 0 STEM") for n in SUMMED],
        *[({n: 4} | HASHED, f"{n} is 4 with stem_ffn hash-moe") for n in SUMMED],
        ({"row_window": 4, "stem_layers": (1,), "borrowed_kv_layers": 1}, "row_window in a model"),
        *[({"laurel_rank": n}, f"laurel_rank is {n}") for n in (-1, MAX_WIDTH + 1)],
        *[
            ({"layer_kinds": (LayerKind(layers=(1,), sparsity=share),)}, "sparsity is")
            for share in (-0.5, 1.0, float("nan"))
        ],
    ],
)
def test_contradictions(changes: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        config(**changes)


def test_shapes_of_a_small_model() -> None:
    shapes = config().backbone_shapes()
    layer = {
        "attention_norm": (4,),
        "wq": (4, 4),
        "wk": (2, 4),
        "wv": (2, 4),
        "wo": (4, 4),
        "ffn_norm": (4,),
        "gate": (6, 4),
        "down": (4, 6),
    }
    assert shapes == {
        "embedding": (10, 4),
        **{f"layers.0.{name}": shape for name, shape in layer.items()},
        "layers.0.up": (6, 4),
        **{f"layers.1.{name}": shape for name, shape in layer.items()},
        "norm": (4,),
        "head": (10, 4),
    }


# One layer: norms 4+4, wq and wo 16 each, wk and wv 8 each, gate and down 24 each = 104;
# both layers, one `up` of 24, the last norm 4, the embedding 40: 276. A head is 40 more.
@pytest.mark.parametrize(
    ("tied", "backbone", "active"),
    [(True, 276, 276 + 6), (False, 316, 316 - 9 * 4 + 6)],
)
def test_parameter_counts(tied: bool, backbone: int, active: int) -> None:
    model = config(tied_head=tied)
    assert model.backbone_parameters == backbone
    assert model.table_parameters == 10 * 6
    assert model.active_parameters == active
