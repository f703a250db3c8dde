"""The demo's STEM language model in torch, with the names of the public STEM trainer.

Shapes: B sequences of T tokens; D = dim; H query heads share K key/value heads of h values; F =
d_ff; V = vocabulary. A STEM layer multiplies its gate by row U[token] of its table, not by w3(x).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

INT4_BLOCK = 32


@dataclass(frozen=True)
class DemoConfig:
    """Sizes of the model by the trainer's names."""

    vocab_size: int
    dim: int = 128
    n_layers: int = 6
    n_heads: int = 4
    n_kv_heads: int = 2
    stem_layers: tuple[int, ...] = (1, 3, 5)
    multiple_of: int = 128
    max_seqlen: int = 256
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5

    @property
    def stem_embedding_dim(self) -> int:
        """The width F: two thirds of 4 D, rounded up to `multiple_of`, as the trainer does."""
        return -(-int(8 * self.dim / 3) // self.multiple_of) * self.multiple_of


class Attention(nn.Module):
    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.head_dim = config.dim // config.n_heads
        self.wq = linear(config.dim, config.n_heads * self.head_dim)
        self.wk = linear(config.dim, config.n_kv_heads * self.head_dim)
        self.wv = linear(config.dim, config.n_kv_heads * self.head_dim)
        self.wo = linear(config.n_heads * self.head_dim, config.dim)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        """x [B, T, D], turns [T, h/2] complex -> [B, T, D]."""
        q, k, v = (
            torch.unflatten(w(x), -1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv)
        )
        q, k, v = (t.transpose(1, 2) for t in (rotate(q, turns), rotate(k, turns), v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out: Tensor = self.wo(mixed.transpose(1, 2).flatten(2))
        return out


class FeedForward(nn.Module):
    """SwiGLU; a STEM layer has no w3 and takes `up` from its table."""

    def __init__(self, config: DemoConfig, is_stem: bool) -> None:
        super().__init__()
        self.w1 = linear(config.dim, config.stem_embedding_dim)
        if not is_stem:
            self.w3 = linear(config.dim, config.stem_embedding_dim)
        self.w2 = linear(config.stem_embedding_dim, config.dim)

    def forward(self, x: Tensor, up: Tensor | None) -> Tensor:
        """x [B, T, D], up [B, T, F] in a STEM layer -> [B, T, D]."""
        out: Tensor = self.w2(functional.silu(self.w1(x)) * (self.w3(x) if up is None else up))
        return out


class Layer(nn.Module):
    def __init__(self, config: DemoConfig, is_stem: bool) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.feed_forward = FeedForward(config, is_stem)
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)

    def forward(self, x: Tensor, turns: Tensor, up: Tensor | None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), turns)
        out: Tensor = x + self.feed_forward(self.ffn_norm(x), up)
        return out


class DemoModel(nn.Module):
    """Token ids [B, T] -> logits [B, T, V]."""

    turns: Tensor

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(
            Layer(config, i in config.stem_layers) for i in range(config.n_layers)
        )
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.output = linear(config.dim, config.vocab_size)
        self.stem_embeddings = nn.ModuleList(
            nn.Embedding(config.vocab_size, config.stem_embedding_dim) for _ in config.stem_layers
        )
        self.register_buffer("turns", rope_turns(config), persistent=False)
        nn.init.normal_(self.tok_embeddings.weight, std=config.dim**-0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        x, turns = self.tok_embeddings(tokens), self.turns[: tokens.shape[1]]
        tables = dict(zip(self.config.stem_layers, self.stem_embeddings, strict=True))
        for i, layer in enumerate(self.layers):
            x = layer(x, turns, tables[i](tokens) if i in tables else None)
        logits: Tensor = self.output(self.norm(x))
        return logits

    def tables(self) -> list[Tensor]:
        """Return the table U [V, F] of each STEM layer."""
        return [table.get_parameter("weight") for table in self.stem_embeddings]


def linear(inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.trunc_normal_(layer.weight, std=inputs**-0.5, a=-3 * inputs**-0.5, b=3 * inputs**-0.5)
    return layer


def rope_turns(config: DemoConfig) -> Tensor:
    """Return the rotations exp(i * position * frequency), complex64 [max_seqlen, h/2]."""
    head_dim = config.dim // config.n_heads
    frequencies = config.rope_theta ** (-torch.arange(0, head_dim, 2) / head_dim)
    angles = torch.outer(torch.arange(config.max_seqlen).float(), frequencies)
    return torch.polar(torch.ones_like(angles), angles)


def rotate(x: Tensor, turns: Tensor) -> Tensor:
    """Apply interleaved RoPE to x [B, T, heads, h]: values 2i and 2i+1 are one complex number."""
    pairs = torch.view_as_complex(torch.unflatten(x.float(), -1, (-1, 2)))
    return torch.view_as_real(pairs * turns[..., None, :]).flatten(-2)


def next_token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the mean cross entropy in nats of tokens [B, T], except each sequence's first."""
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


@torch.no_grad()
def greedy(model: DemoModel, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Generate `count` tokens greedily after each prompt.

    Prompts are padded on the right, which changes no token, because attention is causal.
    """
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    tokens = torch.zeros(len(prompts), int(lengths.max()) + count, dtype=torch.long)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    rows = torch.arange(len(prompts))
    for step in range(count):
        used = int(lengths.max()) + step
        tokens[rows, lengths + step] = model(tokens[:, :used])[rows, lengths + step - 1].argmax(-1)
    return [row[n : n + count].tolist() for row, n in zip(tokens, lengths.tolist(), strict=True)]


def logits_with_int4(model: DemoModel, tokens: Tensor) -> Tensor:
    """Return logits with int4 weights in the layers; gradients ignore the rounding."""
    return functional_call(model, int4_linears(model), (tokens,))


def int4_linears(model: DemoModel) -> dict[str, Tensor]:
    """Return name -> weight rounded to int4 blocks, for each matrix inside the layers."""
    matrices = {
        name: w
        for name, w in model.named_parameters()
        if name.startswith("layers.") and w.ndim == 2
    }
    return {name: w + (rounded(w) - w).detach() for name, w in matrices.items()}


@torch.no_grad()
def rounded(weight: Tensor) -> Tensor:
    """Round weight [rows, columns] to 16 levels, with a scale for each block of columns."""
    blocks = torch.unflatten(weight, 1, (-1, INT4_BLOCK))
    scale = (blocks.abs().amax(-1, keepdim=True) / 8).clamp_min(1e-12)
    return torch.flatten(torch.clamp(torch.round(blocks / scale), -8, 7) * scale, 1)
