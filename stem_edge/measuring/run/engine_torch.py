"""A STEM model in torch bfloat16 as the public trainer computes it, for bench --against.

It has the same shapes and operations (RMSNorm, fused scaled-dot-product attention with a KV cache,
SwiGLU or a row of a table) and random weights. The tables are zeros: on the CPU, only rows that are
used take memory, while the trainer's own model holds all of them, as other devices do here, too.
"""

from __future__ import annotations

import torch
from torch.nn import functional

import stem_edge
from stem_edge.errors import BackendError
from stem_edge.measuring.run.worker import MeasuredEngine


class TorchModel(MeasuredEngine):
    """A model in torch with one context. device: that of torch, such as "cuda", where all of it lies."""

    def __init__(self, bundle: str, context: int, threads: int, device: str = "cpu") -> None:
        torch.set_num_threads(threads)
        config = self._config = stem_edge.open_bundle(bundle).manifest.model
        if config.stem_ffn != "stem" or config.row_rank or not config.plain:
            raise BackendError(
                f"{bundle}: its layers are {config.stem_ffn}, rank {config.row_rank}; torch computes "
                "plain STEM layers and dense ones only: leave out --against torch"
            )
        try:
            self._device = torch.device(device)
            with self._device:
                self._make(context)
        except (
            RuntimeError,
            AssertionError,
        ) as error:  # without CUDA, torch asserts that it has it
            raise BackendError(f"torch cannot use {device}: {error}") from error

    def _make(self, context: int) -> None:
        """Make weights, tables and KV cache on the device."""
        config = self._config
        generator = torch.Generator(self._device).manual_seed(0)
        self._weights = {
            name: torch.randn(shape, generator=generator, dtype=torch.bfloat16).div_(
                shape[-1] ** 0.5
            )
            for name, shape in config.backbone_shapes().items()
        }
        self._tables = {
            layer: torch.zeros(config.vocab_size, config.d_ff, dtype=torch.bfloat16)
            for layer in config.stem_layers
        }
        shape = (config.n_layers, 2, config.n_kv_heads, context, config.head_dim)
        self._kv = torch.zeros(shape, dtype=torch.bfloat16)
        exponents = torch.arange(0, config.head_dim, 2) / config.head_dim
        angles = torch.outer(torch.arange(context), 1 / config.rope_theta**exponents)
        self._turns = torch.polar(torch.ones_like(angles), angles)
        self._position = 0

    def clear(self) -> None:
        self._position = 0

    @torch.inference_mode()
    def choose(self, token_ids: list[int]) -> int:
        with self._device:
            return self._choose(token_ids)

    def _choose(self, token_ids: list[int]) -> int:
        ids, weights = torch.tensor(token_ids), self._weights
        x = functional.embedding(ids, weights["embedding"])
        for layer in range(self._config.n_layers):
            at = f"layers.{layer}."
            x = x + self._attention(layer, self._norm(x, weights[at + "attention_norm"]))
            inner = self._norm(x, weights[at + "ffn_norm"])
            if layer in self._tables:
                up = functional.embedding(ids, self._tables[layer])
            else:
                up = functional.linear(inner, weights[at + "up"])
            gate = functional.silu(functional.linear(inner, weights[at + "gate"]))
            x = x + functional.linear(gate * up, weights[at + "down"])
        self._position += len(token_ids)
        last = self._norm(x[-1:], weights["norm"])
        head = weights["embedding" if self._config.tied_head else "head"]
        return int(functional.linear(last, head).argmax())

    def _attention(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        config, at = self._config, f"layers.{layer}."
        start, stop = self._position, self._position + len(x)
        q, k, v = (
            functional.linear(x, self._weights[at + name]).view(len(x), -1, config.head_dim)
            for name in ("wq", "wk", "wv")
        )
        turns = self._turns[start:stop, None]
        q, k = (self._turn(part, turns).transpose(0, 1) for part in (q, k))
        cache = self._kv[layer]
        cache[0, :, start:stop], cache[1, :, start:stop] = k, v.transpose(0, 1)
        keys, values = cache[:, :, :stop].repeat_interleave(config.n_heads // config.n_kv_heads, 1)
        mask = None
        if len(x) > 1:
            mask = torch.ones(len(x), stop, dtype=torch.bool).tril(start)
        mixed = functional.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        return functional.linear(
            mixed.transpose(0, 1).reshape(len(x), -1), self._weights[at + "wo"]
        )

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, (x.shape[-1],), weight, self._config.norm_eps)

    @staticmethod
    def _turn(heads: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(heads.float().reshape(*heads.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * turns).flatten(-2).to(heads.dtype)
