"""Write a checkpoint with random weights in a layout of the public STEM trainer.

    python tools/make_checkpoint.py OUT --vocab-size 128256 --dim 64 --layers 6 --stem 2 5

For tests and benchmarks: the shapes are real, the text it generates is noise.
"""

from __future__ import annotations

import argparse
import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

Layout = Literal["training", "consolidated"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Shape:
    """Sizes of a model by the trainer's names; its FFN width is given, not derived."""

    vocab_size: int = 300
    dim: int = 32
    n_layers: int = 3
    n_heads: int = 4
    n_kv_heads: int = 2
    d_ff: int = 64
    stem_layers: tuple[int, ...] = (1, 2)
    max_seqlen: int = 128
    tied_head: bool = False

    def backbone(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of the tensors outside of the tables."""
        heads = self.dim // self.n_heads
        kv = self.n_kv_heads * heads
        shapes: dict[str, tuple[int, ...]] = {"tok_embeddings": (self.vocab_size, self.dim)}
        for layer in range(self.n_layers):
            at = f"layers.{layer}."
            for name, rows in (("wq", self.dim), ("wk", kv), ("wv", kv), ("wo", self.dim)):
                shapes[f"{at}attention.{name}"] = (rows, self.dim)
            shapes[at + "feed_forward.w1"] = (self.d_ff, self.dim)
            shapes[at + "feed_forward.w2"] = (self.dim, self.d_ff)
            if layer not in self.stem_layers:
                shapes[at + "feed_forward.w3"] = (self.d_ff, self.dim)
            shapes |= {at + "attention_norm": (self.dim,), at + "ffn_norm": (self.dim,)}
        shapes["norm"] = (self.dim,)
        if not self.tied_head:
            shapes["output"] = (self.vocab_size, self.dim)
        return shapes

    def params(self, parts: int, dtype: str) -> dict[str, Any]:
        """params.json."""
        model = {
            "vocab_size": self.vocab_size,
            "dim": self.dim,
            "n_layers": self.n_layers,
            "n_heads": self.n_heads,
            "n_kv_heads": self.n_kv_heads,
            "stem_layers": list(self.stem_layers),
            "stem_embedding_dim": self.d_ff,
            "max_seqlen": self.max_seqlen,
            "weight_tying": self.tied_head,
        }
        return {
            "name": "random",
            "distributed": {"model_dtype": dtype, "stem_parallel_size": parts},
            "model": model,
            "data": {"tokenizer": {"name": "bytes", "path": None}, "add_bos": True},
        }


def write_checkpoint(
    out: Path,
    shape: Shape,
    *,
    layout: Layout = "training",
    parts: int = 2,
    dtype: str = "fp32",
    prefix: str = "",
    seed: int = 0,
) -> Path:
    """Write the folder `out`; returns it. `parts` is the number of column shards."""
    generator = torch.Generator().manual_seed(seed)
    backbone = {
        f"{prefix}{name}.weight": _weight(size, generator).to(DTYPES[dtype])
        for name, size in shape.backbone().items()
    }
    tables = [
        torch.randn(shape.vocab_size, shape.d_ff, generator=generator).to(DTYPES[dtype])
        for _ in shape.stem_layers
    ]
    out.mkdir(parents=True)
    (out / "params.json").write_text(json.dumps(shape.params(parts, dtype)))
    names = [f"stem_embeddings.{number}.weight" for number in range(len(tables))]
    if layout == "consolidated":
        torch.save({"model": backbone}, out / "consolidated.pth")
        torch.save(dict(zip(names, tables, strict=True)), out / "consolidated_stem.pth")
        return out
    with warnings.catch_warnings():
        # One process is all there is, and torch says so at length.
        warnings.filterwarnings("ignore", "torch.distributed is")
        save_distributed({"model": backbone}, checkpoint_id=out, no_dist=True)
    (out / "stem_shards").mkdir()
    for part, columns in enumerate(zip(*(t.chunk(parts, dim=1) for t in tables), strict=True)):
        # Cloned, because torch saves the whole storage behind a view.
        state = {name: piece.clone() for name, piece in zip(names, columns, strict=True)}
        torch.save(state, out / "stem_shards" / f"stem_model_mp{part}.pt")
    return out


def _weight(size: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    if len(size) == 1:
        return 1 + 0.1 * torch.randn(size, generator=generator)
    weight: torch.Tensor = torch.randn(size, generator=generator) / size[1] ** 0.5
    return weight


def main() -> None:
    """Parse the shape and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="new folder")
    for name, value in (("vocab-size", 300), ("dim", 64), ("layers", 6), ("heads", 4)):
        parser.add_argument(f"--{name}", type=int, default=value, help=f"({value})")
    parser.add_argument("--d-ff", type=int, help="FFN width (4 dim)")
    parser.add_argument("--stem", type=int, nargs="+", default=[2, 5], help="STEM layers (2 5)")
    parser.add_argument("--parts", type=int, default=2, help="column shards (2)")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="(bf16)")
    parser.add_argument("--context", type=int, default=2048, help="(2048)")
    args = parser.parse_args()
    shape = Shape(
        vocab_size=args.vocab_size,
        dim=args.dim,
        n_layers=args.layers,
        n_heads=args.heads,
        n_kv_heads=args.heads,
        d_ff=args.d_ff or 4 * args.dim,
        stem_layers=tuple(args.stem),
        max_seqlen=args.context,
    )
    write_checkpoint(args.out, shape, parts=args.parts, dtype=args.dtype)
    print(f"{args.out}: done; export it with: stem-edge export {args.out} OUT")


if __name__ == "__main__":
    main()
