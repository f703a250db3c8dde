"""A reference in plain torch for every model that ModelConfig describes.

Written from the papers' equations, not from stem_edge.numerics.reference, so that mistakes there show.
Tensors have the names of ModelConfig.backbone_shapes(); T tokens, D = dim, F = d_ff.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from stem_edge.config import ModelConfig
from stem_edge.layers import LinearRope, Llama3Rope, YarnRope

QUERIES = 1024  # tokens whose scores are computed at once, because those of 32k take gigabytes


@torch.no_grad()
def torch_logits(
    config: ModelConfig,
    tensors: dict[str, Tensor],
    rows: dict[int, Tensor],
    token_ids: list[int],
    looked_up: dict[int, Tensor] | None = None,
    before: Callable[[int, Tensor], Tensor] = lambda layer, x: x,
) -> Tensor:
    """Logits [T, V] of token_ids; rows: layer -> the row of each token [V, row width].

    looked_up: layer -> the row of each position [T, row width], if not that of its token.
    before: changes the hidden states [T, D] that a layer begins with.
    """
    tokens = torch.tensor(token_ids)
    turns = rope_turns(config, len(tokens))
    x = tensors["embedding"][tokens]
    for layer in range(config.n_layers):
        prefix, x = f"layers.{layer}.", before(layer, x)
        w = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
        y = attention(config, layer, w, norm(x, w["attention_norm"], config.norm_eps), turns)
        x = x + (norm(y, w["attention_post_norm"], config.norm_eps) if config.post_norms else y)
        row = rows[layer][tokens] if layer in config.stem_layers else None
        if row is not None and looked_up is not None:
            row = looked_up[layer]
        if row is not None and config.row_window:
            row = mean_of_last(row, token_ids, config.row_window, config.eos_ids)
        y = ffn(config, w, norm(x, w["ffn_norm"], config.norm_eps), row)
        x = x + (norm(y, w["ffn_post_norm"], config.norm_eps) if config.post_norms else y)
    x = norm(x, tensors["norm"], config.norm_eps)
    head = tensors["embedding"] if config.tied_head else tensors["head"]
    logits = functional.linear(x, head, tensors.get("head.bias"))
    cap = config.logit_softcap
    return cap * torch.tanh(logits / cap) if cap else logits


def mean_of_last(rows: Tensor, ids: list[int], window: int, ends: tuple[int, ...]) -> Tensor:
    """Means [T, K] of the rows of the last tokens, within their documents."""
    means, document = [], list[Tensor]()
    for token, row in zip(ids, rows, strict=True):
        document.append(row)
        means.append(torch.stack(document[-window:]).mean(0))
        if token in ends:
            document = []
    return torch.stack(means)


def attention(
    config: ModelConfig, layer: int, w: dict[str, Tensor], x: Tensor, turns: Tensor
) -> Tensor:
    """Causal grouped-query attention of x [T, D]."""
    q, k, v = (
        torch.unflatten(linear(x, w, name), -1, (-1, config.head_dim)).transpose(0, 1)
        for name in ("wq", "wk", "wv")
    )
    if config.qk_norm_eps is not None:
        q, k = norm(q, w["q_norm"], config.qk_norm_eps), norm(k, w["k_norm"], config.qk_norm_eps)
    q, k = rotate(config, q, turns), rotate(config, k, turns)
    windowed = config.window_layers is None or layer in config.window_layers
    window = config.sliding_window if windowed else 0
    mixed = [attended(q, k, v, start, window) for start in range(0, len(x), QUERIES)]
    return linear(torch.cat(mixed, 1).transpose(0, 1).flatten(1), w, "wo")


def attended(q: Tensor, k: Tensor, v: Tensor, start: int, window: int) -> Tensor:
    """Values [heads, n, head_dim] that QUERIES tokens from `start` on attend to, of q, k, v."""
    stop = min(start + QUERIES, q.shape[1])
    first = max(0, start - window + 1) if window else 0
    ago = torch.arange(start, stop)[:, None] - torch.arange(first, stop)
    sees = (ago >= 0) & (ago < (window or stop))
    keys, values = k[None, :, first:stop], v[None, :, first:stop]
    return functional.scaled_dot_product_attention(
        q[None, :, start:stop], keys, values, attn_mask=sees, enable_gqa=True
    )[0]


def ffn(config: ModelConfig, w: dict[str, Tensor], x: Tensor, row: Tensor | None) -> Tensor:
    """The feed-forward network of x [T, D], with the tokens' rows [T, row width] in STEM layers."""
    if row is not None and config.stem_ffn == "hash-moe":  # eq. 3
        return torch.stack([expert(config, x[t], row[t]) for t in range(len(x))])
    if row is not None and config.row_experts:
        row = mixed_rows(x, w["router"], row)
    if row is not None and config.row_rank:
        row = row @ w["project"].T
    if row is None:
        hidden = functional.silu(linear(x, w, "gate")) * linear(x, w, "up")
    elif config.stem_ffn == "stem":  # eq. 4
        hidden = functional.silu(linear(x, w, "gate")) * row
    elif config.stem_ffn == "stem-plus":  # eq. 5
        hidden = functional.silu(linear(x, w, "gate")) * (linear(x, w, "up") + row)
    elif config.stem_ffn == "stem-mix":  # the trainer's stem_dag
        share = torch.sigmoid(w["mix"])
        up = (1 - share) * linear(x, w, "up") + share * row
        hidden = functional.silu(linear(x, w, "gate")) * up
    else:  # 4.4.2
        hidden = functional.silu(row) * linear(x, w, "up")
    return linear(hidden, w, "down")


def mixed_rows(x: Tensor, router: Tensor, row: Tensor) -> Tensor:
    """Sums over the rows of each token, each by its share."""
    shares = torch.softmax(x @ router.T, -1)
    return torch.einsum("te,tek->tk", shares, row.unflatten(-1, (len(router), -1)))


def expert(config: ModelConfig, x: Tensor, row: Tensor) -> Tensor:
    """Apply a token's own FFN: x [D] -> [D]."""
    size = config.d_ff * config.dim
    both = row[: 2 * size].view(config.d_ff, 2, config.dim)
    gate, up, down = both[:, 0], both[:, 1], row[2 * size :].view(config.dim, config.d_ff)
    return down @ (functional.silu(gate @ x) * (up @ x))


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return functional.rms_norm(x, weight.shape, weight, eps)


def linear(x: Tensor, w: dict[str, Tensor], name: str) -> Tensor:
    return functional.linear(x, w[name], w.get(name + ".bias"))


def rotate(config: ModelConfig, x: Tensor, turns: Tensor) -> Tensor:
    """x [heads, T, head_dim], its pairs as complex numbers, times turns [T, head_dim / 2]."""
    if config.rope_interleaved:
        pairs = torch.view_as_complex(torch.unflatten(x, -1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * turns).flatten(-2)
    first, second = x.chunk(2, dim=-1)
    turned = torch.complex(first.contiguous(), second.contiguous()) * turns
    return torch.cat([turned.real, turned.imag], dim=-1)


def rope_turns(config: ModelConfig, length: int) -> Tensor:
    """size * exp(i * position * frequency), complex64 [length, head_dim / 2]."""
    size, scaling = 1.0, config.rope_scaling
    # In float32, as trainers compute them: after thousands of tokens, its rounding is far from small.
    exponents = torch.arange(0, config.head_dim, 2).float() / config.head_dim
    frequencies = (1 / config.rope_theta**exponents).tolist()
    if isinstance(scaling, LinearRope):
        frequencies = [f / scaling.factor for f in frequencies]
    if isinstance(scaling, Llama3Rope):
        frequencies = [llama3(f, scaling) for f in frequencies]
    if isinstance(scaling, YarnRope):
        frequencies = [yarn(f, pair, scaling, config) for pair, f in enumerate(frequencies)]
        size = scaling.attention_factor
    angles = torch.outer(torch.arange(length).float(), torch.tensor(frequencies))
    return torch.polar(torch.full_like(angles, size), angles)


def llama3(frequency: float, scaling: Llama3Rope) -> float:
    wavelength = 2 * math.pi / frequency
    longest = scaling.original_context / scaling.low_freq_factor
    shortest = scaling.original_context / scaling.high_freq_factor
    if wavelength > longest:
        return frequency / scaling.factor
    if wavelength < shortest:
        return frequency
    smooth = (scaling.original_context / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    return (1 - smooth) * frequency / scaling.factor + smooth * frequency


def yarn(frequency: float, pair: int, scaling: YarnRope, config: ModelConfig) -> float:
    """NTK by parts: pairs that turn beta_fast times stay, those below beta_slow are stretched."""

    def pair_that_turns(times: float) -> float:
        turned = scaling.original_context / (2 * math.pi * times)
        return config.head_dim / 2 * math.log(turned, config.rope_theta)

    low, high = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.head_dim - 1)
    stretched = min(1.0, max(0.0, (pair - low) / max(high - low, 0.001)))
    return stretched * frequency / scaling.factor + (1 - stretched) * frequency


def random_tensors(config: ModelConfig, seed: int) -> tuple[dict[str, Tensor], dict[int, Tensor]]:
    """Random tensors and rows that make every part of the model matter."""
    random = torch.Generator().manual_seed(seed)
    tensors = {
        name: random_tensor(name, shape, random) for name, shape in config.backbone_shapes().items()
    }
    tables = random_tables(config, seed)
    index = expert_of_token(config) if config.n_experts else torch.arange(config.vocab_size)
    return tensors, {layer: table[index] for layer, table in tables.items()}


def random_tables(config: ModelConfig, seed: int) -> dict[int, Tensor]:
    """Layer -> table [records, row width]."""
    random = torch.Generator().manual_seed(seed + 1_000_000)
    return {
        layer: torch.cat(
            [
                torch.randn(config.records, math.prod(part), generator=random)
                / (math.sqrt(part[1]) if len(part) == 2 else 1)
                for part in config.row_parts()
            ],
            dim=1,
        )
        for layer in config.row_layers
    }


def expert_of_token(config: ModelConfig) -> Tensor:
    """The expert of each token in random_tensors, int64 [V]: every expert has some."""
    return (torch.arange(config.vocab_size) * 7 + 3) % config.n_experts


def random_tensor(name: str, shape: tuple[int, ...], random: torch.Generator) -> Tensor:
    values = torch.randn(shape, generator=random)
    if name.endswith("norm"):
        return 1 + 0.3 * values
    if name.endswith(".bias"):
        return 0.5 * values
    if len(shape) == 1:
        return values
    gain = 2 if name.endswith((".wq", ".wk")) else 1  # attention that prefers some tokens
    return values if name == "embedding" else gain * values / math.sqrt(shape[1])
