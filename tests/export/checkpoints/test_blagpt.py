"""States of BlaGPT's trainer: every supported option; all others are refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import exports
import numpy as np
import pytest
import torch
from torch.nn import functional
from whole_model import forward

from stem_edge.export.checkpoints.blagpt import find_states, read_checkpoint
from stem_edge.numerics.quantize import F32

OPTIONS: dict[str, Any] = {
    "block_size": 32, "vocab_size": 24, "n_layer": 4, "n_head": 4, "n_kv_head": 2, "n_embd": 16,
    "bias": True, "use_qkv_bias": False, "tie_embed_weights": True, "rmsnorm_before_qk": True,
    "use_pre_post_norm": False, "rope_theta": 10000, "pos_encoding": "rotary", "n_predict": 1,
    "rope_variant": "standard", "attention": "regular", "norm_layer": "rmsnorm",
    "activation": "swiglu", "use_stem": True, "stem_ratio": "1/2", "stem_layers": [],
    "dropout": 0.1, "z_loss_weight": 1e-4, "optimizer_name": "Muon", "optimizer_args": {"eps": 1e-8},
    "zero_init_proj_layers": True, "use_engram": False, "engram_ngram": 3, "use_top": False,
}  # fmt: skip
IDS = [3, 1, 4, 1, 5, 9, 2, 6, 23, 0]


def weights(options: dict[str, Any], tables: set[int]) -> dict[str, torch.Tensor]:
    """Random tensors by the trainer's names, norms and biases included."""
    generator = torch.Generator().manual_seed(1)
    dim, width, vocab = options["n_embd"], 4 * options["n_embd"], options["vocab_size"]
    head = dim // options["n_head"]
    kv = 2 * options["n_kv_head"] * head
    state: dict[str, torch.Tensor] = {}

    def draw(name: str, *shape: int, bias: bool = False) -> None:
        state[name + ".weight"] = torch.randn(shape, generator=generator) * 0.3 + (len(shape) == 1)
        if bias:
            state[name + ".bias"] = torch.randn(shape[0], generator=generator)

    draw("transformer.wte", vocab, dim)
    for layer in range(options["n_layer"]):
        at, biased = f"transformer.h.{layer}.", options["bias"]
        draw(at + "attn.q_proj", dim, dim, bias=biased or options["use_qkv_bias"])
        draw(at + "attn.kv_proj", kv, dim, bias=biased or options["use_qkv_bias"])
        draw(at + "attn.c_proj", dim, dim, bias=biased)
        draw(at + "mlp.c_gate", width, dim, bias=biased)
        draw(at + "mlp.c_proj", dim, width, bias=biased)
        if layer in tables:
            draw(at + "mlp.stem_embedding", vocab, width)
        else:
            draw(at + "mlp.c_fc", width, dim, bias=biased)
        for norm in ("ln_1", "ln_2", *(("ln_3", "ln_4") if options["use_pre_post_norm"] else ())):
            draw(at + norm, dim)
        for norm in ("q_norm", "k_norm") if options["rmsnorm_before_qk"] else ():
            draw(f"{at}attn.{norm}", head)
    draw("transformer.ln_f", dim)
    draw("lm_head", vocab, dim)
    if options["tie_embed_weights"]:
        state["lm_head.weight"] = state["transformer.wte.weight"]
    if options["use_top"]:
        draw("top_head", vocab, dim)
    return state


def trainers_logits(options: dict[str, Any], state: dict[str, torch.Tensor]) -> F32:
    """Compute the trainer's logits from its own tensors."""

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.linear(x, state[name + ".weight"], state.get(name + ".bias"))

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        if name + ".weight" not in state:
            return x
        return functional.rms_norm(x, x.shape[-1:], state[name + ".weight"], 1e-8)

    def turn(x: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        steps = torch.arange(half) * 2 / x.shape[-1]
        angles = torch.outer(torch.arange(len(IDS)), 1 / options["rope_theta"] ** steps)[:, None]
        a, b, cos, sin = x[..., :half], x[..., half:], angles.cos(), angles.sin()
        return torch.cat([a * cos + b * sin, b * cos - a * sin], -1)

    def attend(x: torch.Tensor, at: str) -> torch.Tensor:
        heads, groups = options["n_head"], options["n_kv_head"]
        q = linear(x, at + "q_proj").view(len(IDS), heads, -1)
        k, v = linear(x, at + "kv_proj").view(len(IDS), 2, groups, -1).unbind(1)
        q, k = turn(norm(q, at + "q_norm")), turn(norm(k, at + "k_norm"))
        k, v = (y.repeat_interleave(heads // groups, 1) for y in (k, v))
        mixed = functional.scaled_dot_product_attention(
            q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), is_causal=True
        )
        return linear(mixed.transpose(0, 1).reshape(len(IDS), -1), at + "c_proj")

    def feed(x: torch.Tensor, at: str) -> torch.Tensor:
        table = state.get(at + "stem_embedding.weight")
        up = linear(x, at + "c_fc") if table is None else table[IDS]
        return linear(functional.silu(linear(x, at + "c_gate")) * up, at + "c_proj")

    x = state["transformer.wte.weight"][IDS]
    for layer in range(options["n_layer"]):
        at = f"transformer.h.{layer}."
        x = x + norm(attend(norm(x, at + "ln_1"), at + "attn."), at + "ln_3")
        x = x + norm(feed(norm(x, at + "ln_2"), at + "mlp."), at + "ln_4")
    logits: F32 = linear(norm(x, "transformer.ln_f"), "lm_head").numpy()
    return logits


def save(path: Path, options: dict[str, Any], state: dict[str, torch.Tensor], **more: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"step": 7, "code": "raise SystemExit", "model_config": options, "model": state}
    torch.save(content | more, path)
    return path


@pytest.fixture
def good(tmp_path: Path) -> Path:
    """A supported state with tables in layers 1 and 3."""
    return save(tmp_path / "run/state_step000007.pt", OPTIONS, weights(OPTIONS, {1, 3}))


def edit(path: Path, options: dict[str, Any] | None = None, **tensors: Any) -> Path:
    """Change some options and tensors (`__` for a dot) of a state; `...` removes one."""
    content = torch.load(path, weights_only=True)
    changes = {name.replace("__", "."): value for name, value in tensors.items()}
    for entry, changed in (("model_config", options or {}), ("model", changes)):
        for name, value in changed.items():
            content[entry].pop(name, None)
            if value is not ...:
                content[entry][name] = value
    torch.save(content, path)
    return path


def refused(path: Path, *parts: str) -> None:
    exports.refused(lambda: read_checkpoint(path), path, *parts)


VARIANTS: dict[str, tuple[dict[str, Any], set[int]]] = {
    "half": ({}, {1, 3}),
    "third": ({"stem_ratio": "1/3"}, {2}),
    "full": ({"stem_ratio": "full"}, {1, 2, 3}),
    "listed, never the first": ({"stem_layers": [2, 0, 1]}, {1, 2}),
    "dense": ({"use_stem": False}, set()),
    "a ratio that the trainer does not know": ({"stem_ratio": "1/5"}, set()),
    "no biases": ({"bias": False}, {1, 3}),
    "biases of q, k and v": ({"bias": False, "use_qkv_bias": True}, {1, 3}),
    "norms after attention and FFN": ({"use_pre_post_norm": True}, {1, 3}),
    "no norms of q and k": ({"rmsnorm_before_qk": False}, {1, 3}),
    "its own head": ({"tie_embed_weights": False}, {1, 3}),
    "as many heads of k and v": ({"n_kv_head": 4, "rope_theta": 1e6}, {1, 3}),
    "a head that only trains": ({"use_top": True, "top_window_size": 8}, {1, 3}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_option_computes_what_the_trainer_computes(variant: str, tmp_path: Path) -> None:
    changed, tables = VARIANTS[variant]
    options = OPTIONS | changed
    state = weights(options, tables)
    checkpoint = read_checkpoint(save(tmp_path / "state_step000007.pt", options, state))
    assert checkpoint.config.stem_layers == tuple(sorted(tables))
    found = forward(checkpoint.config, checkpoint.backbone, checkpoint.rows, IDS)
    assert np.abs(found - trainers_logits(options, state)).max() < 1e-4


OFF = [
    *("use_soft_logit_capping", "use_res_weights", "use_per_token_output_bias", "use_softpick"),
    *("use_canon_layers", "use_parallel_blocks", "use_per_layer_token_emb", "use_engram"),
    *("use_kda_interleaving", "enable_weight_sharing", "use_what_comes_next"),
]


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("attention", "kda", "'regular'"), ("attention", ..., "'regular'"),
        ("norm_layer", "layernorm", "'rmsnorm'"), ("activation", "polynorm", "'swiglu'"),
        ("pos_encoding", "none", "'rotary'"), ("rope_variant", "simplified", "'standard'"),
        ("n_predict", 2, "1"), *((name, True, "False") for name in OFF), ("new_window", 512, "off"),
        ("new_kind", "a\nb" * 99, "off"), ("new_tensor", torch.ones(2, 2), "off"),
    ],
)  # fmt: skip
def test_an_unsupported_option_is_refused_by_name(
    good: Path, name: str, value: object, expected: str
) -> None:
    found = "None" if value is ... else " ".join(repr(value).split())[:40]
    found = "a tensor [2, 2] of F32" if isinstance(value, torch.Tensor) else found
    refused(edit(good, {name: value}), f"{name} is {found}", f"expected {expected}")


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"n_embd": 32}, ["disagree", "embedding is [24, 16], expected [24, 32]"]),
        ({"vocab_size": 25}, ["embedding is [24, 16], expected [25, 16]"]),
        ({"n_kv_head": 1}, ["wv is [12, 16], expected [4, 16]"]),
        ({"n_kv_head": 3}, ["n_heads 4 is not a multiple of n_kv_heads 3"]),
        ({"n_head": 0}, ["n_head"]), ({"n_head": 64}, ["head_dim is 0"]),
        ({"n_layer": 10**9}, ["n_layer"]), ({"n_layer": ...}, ["n_layer"]),
        ({"n_embd": "16"}, ["n_embd"]), ({"rope_theta": float("nan")}, ["rope_theta"]),
        ({"bias": False}, ["bias is not part"]),
        ({"rmsnorm_before_qk": False}, ["q_norm", "not part"]),
        ({"use_pre_post_norm": True}, ["attention_post_norm is missing"]),
        ({"stem_ratio": "full"}, ["table of layer 2 is missing", "layers.2.up is not part of such"]),
        ({"use_stem": False}, ["layers.1.up is missing", "table of layer 3 is not part of such"]),
    ],
)  # fmt: skip
def test_options_that_contradict_the_tensors(
    good: Path, options: dict[str, Any], parts: list[str]
) -> None:
    refused(edit(good, options), *parts)


@pytest.mark.parametrize(
    ("tensors", "parts"),
    [
        ({"lm_head__weight": torch.zeros(24, 16)}, ["tie_embed_weights", "lm_head.weight"]),
        ({"lm_head__weight": torch.zeros(2).half()}, ["tie_embed_weights", "lm_head.weight"]),
        ({"transformer__wte__weight": ...}, ["embedding is missing"]),
        ({"transformer__h__0__attn__gate__weight": torch.zeros(2)}, ["attn.gate", "not part"]),
        ({"transformer__h__0__ln_1__bias": torch.zeros(16)}, ["attention_norm.bias", "not part"]),
        ({"top_head__weight": torch.zeros(24, 16)}, ["top_head.weight", "not part"]),
        ({"transformer__h__1__mlp__stem_embedding__weight": torch.zeros(9, 64)}, ["[9, 64]"]),
        ({"transformer__ln_f__weight": torch.zeros(16, 1, 1)}, ["[16, 1, 1]"]),
        ({"transformer__ln_f__weight": torch.tensor(1.0)}, ["[]"]),
        ({"transformer__ln_f__weight": torch.zeros(16, dtype=torch.int8)}, ["is I8"]),
        ({"transformer__ln_f__weight": torch.eye(16).to_sparse()}, ["without plain values"]),
        ({"transformer__ln_f__weight": [1.0] * 16}, ["transformer.ln_f.weight", "list"]),
        ({"module__lm_head__weight": torch.zeros(24, 16)}, ["module.lm_head.weight", "once"]),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    good: Path, tensors: dict[str, Any], parts: list[str]
) -> None:
    refused(edit(good, **tensors), *parts)


@pytest.mark.parametrize("content", [{}, {"model": {}}, {"model_config": 3, "model": {}}])
def test_a_file_of_another_kind_is_refused(tmp_path: Path, content: object) -> None:
    torch.save(content, tmp_path / "x.pt")
    refused(tmp_path / "x.pt", "BlaGPT", "model_config")


def test_the_newest_state_of_a_folder_is_read(good: Path) -> None:
    content = good.read_bytes()
    names = ["state_step000007.pt", "state_step000020.pt", "state_step999999.pt"]
    for name in [*names, "best_model_2000000.pt"]:
        (good.parent / name).write_bytes(content)
    (good.parent / "other.pt").write_bytes(b"")
    states = find_states(good.parent)
    assert [state.name for state in states] == ["best_model_2000000.pt", *names]
    checkpoint = read_checkpoint(good.parent)
    assert checkpoint.path.name == "state_step999999.pt"
    assert "state_step999999.pt of 4 states" in checkpoint.notes[0]
    assert "best_model_2000000.pt" in checkpoint.notes[0]
