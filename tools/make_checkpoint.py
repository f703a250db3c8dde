"""Write a checkpoint of random weights in a layout of the public STEM trainer.

    python tools/make_checkpoint.py OUT --shape llama-3.2-1b --stem third
    python tools/make_checkpoint.py OUT --shape small --stem 2 5
    python tools/make_checkpoint.py OUT --shape gemma-4-e2b --packed
    python tools/make_checkpoint.py OUT --shape gemma-4-e2b-assistant

For tests and benchmarks: the shapes are real, generated text is noise. Tables are written in pieces,
so they may be larger than memory: with every third layer, the 1B shape takes 13 GB on disk.
"""

from __future__ import annotations

import argparse
import json
import mmap
import zlib
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import gemma_checkpoint
import torch
from gemma_checkpoint import describe, write_gemma

MIX = "feed_forward.alpha"  # a parameter without a module, so its name has no `.weight`
Layout = Literal["training", "consolidated"]  # tables in shards of columns, or in one file
# Tables are cut from one block of this many random values: drawing 17 billion would take minutes.
NOISE_VALUES = 1 << 22
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Shape:
    """Sizes of a model, named as in the trainer, except d_ff, which is the real FFN width."""

    vocab_size: int = 300
    dim: int = 32
    n_layers: int = 3
    n_heads: int = 4
    n_kv_heads: int = 2
    d_ff: int = 64
    stem_layers: tuple[int, ...] = (1, 2)
    max_seqlen: int = 128
    rope_theta: float = 10_000.0
    tied_head: bool = False
    mixed: bool = False  # STEM layers keep w3, as in stem_dag

    def backbone(self) -> dict[str, tuple[int, ...]]:
        """Return name -> shape of each tensor outside the tables."""
        heads = self.dim // self.n_heads
        kv = self.n_kv_heads * heads
        shapes: dict[str, tuple[int, ...]] = {"tok_embeddings": (self.vocab_size, self.dim)}
        for layer in range(self.n_layers):
            at = f"layers.{layer}."
            for name, rows in (("wq", self.dim), ("wk", kv), ("wv", kv), ("wo", self.dim)):
                shapes[f"{at}attention.{name}"] = (rows, self.dim)
            stem = layer in self.stem_layers
            for name in ("w1",) if stem and not self.mixed else ("w1", "w3"):
                shapes[f"{at}feed_forward.{name}"] = (self.d_ff, self.dim)
            shapes[at + "feed_forward.w2"] = (self.dim, self.d_ff)
            shapes |= {at + MIX: (1,)} if stem and self.mixed else {}
            shapes |= {at + "attention_norm": (self.dim,), at + "ffn_norm": (self.dim,)}
        shapes["norm"] = (self.dim,)
        if not self.tied_head:
            shapes["output"] = (self.vocab_size, self.dim)
        return shapes

    def params(self, parts: int, dtype: str) -> dict[str, Any]:
        """Return the content of params.json."""
        model = asdict(self)
        model.pop("mixed")
        model |= {"stem_embedding_dim": model.pop("d_ff"), "weight_tying": model.pop("tied_head")}
        return {
            "name": "random",
            "distributed": {"model_dtype": dtype, "stem_parallel_size": parts},
            "model": model,
            "data": {"tokenizer": {"name": "bytes", "path": None}, "add_bos": True},
        }


SHAPES = {
    "small": Shape(dim=64, n_layers=6, n_kv_heads=4, d_ff=256, stem_layers=(2, 5)),
    "llama-3.2-1b": Shape(
        vocab_size=128_256, dim=2048, n_layers=16, n_heads=32, n_kv_heads=8, d_ff=8192,
        stem_layers=(), max_seqlen=8192, rope_theta=500_000.0, tied_head=True,
    ),
}  # fmt: skip

GEMMAS = [*gemma_checkpoint.SHAPES, gemma_checkpoint.ASSISTANT]


def stem_layers(ratio: str, n_layers: int) -> tuple[int, ...]:
    """Return the layers that get a table: every third, every second, all but the first, or none."""
    spans = {"third": (2, 3), "half": (1, 2), "full": (1, 1), "dense": (n_layers, 1)}
    return tuple(range(spans[ratio][0], n_layers, spans[ratio][1]))


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
    """Write a random checkpoint to `out` and return `out`. parts: number of column shards."""
    kind = DTYPES[dtype]
    backbone = {
        prefix + name + ".weight" * (not name.endswith(MIX)): torch.empty(size, dtype=kind)
        for name, size in shape.backbone().items()
    }
    names = [f"stem_embeddings.{number}.weight" for number in range(len(shape.stem_layers))]
    out.mkdir(parents=True)
    (out / "params.json").write_text(json.dumps(shape.params(parts, dtype)))
    drawn = {n: _weight(n.removeprefix(prefix), value, seed) for n, value in backbone.items()}
    torch.save({"model": drawn}, out / "consolidated.pth")
    if layout == "consolidated":
        _write_tables(out / "consolidated_stem.pth", names, shape, range(shape.d_ff), kind, seed)
        return out
    if names:
        (out / "stem_shards").mkdir()
    width = -(-shape.d_ff // parts)
    for part in range(parts if names else 0):
        path = out / "stem_shards" / f"stem_model_mp{part}.pt"
        columns = range(shape.d_ff)[part * width : (part + 1) * width]
        _write_tables(path, names, shape, columns, kind, seed)
    return out


def _weight(name: str, like: torch.Tensor, seed: int) -> torch.Tensor:
    """Draw a weight of the shape and dtype of `like`; it depends on name and seed only."""
    generator = torch.Generator().manual_seed(seed << 32 | zlib.crc32(name.encode()))
    values = torch.randn(like.shape, generator=generator, dtype=like.dtype)
    return values.mul_(0.1).add_(1) if values.ndim == 1 else values.div_(values.shape[1] ** 0.5)


def _write_tables(
    path: Path, names: list[str], shape: Shape, columns: range, kind: torch.dtype, seed: int
) -> None:
    """Write some columns of all tables: create a sparse file, then fill it through a memory map."""
    size = (shape.vocab_size, len(columns))
    state = {name: torch.empty(size, dtype=kind) for name in names}
    with torch.serialization.skip_data():
        torch.save(state, path)
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(NOISE_VALUES, generator=generator).to(kind)
    with torch.serialization.set_default_mmap_options(mmap.MAP_SHARED):
        mapped = torch.load(path, mmap=True, weights_only=True)
    for table in mapped.values():
        for rows in table.split(max(1, NOISE_VALUES // (2 * shape.d_ff))):
            values = len(rows) * shape.d_ff
            start = int(torch.randint(NOISE_VALUES - values, (1,), generator=generator))
            drawn = noise[start : start + values].view(len(rows), shape.d_ff)
            rows.copy_(drawn[:, columns.start : columns.stop])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to create")
    usual = "llama-3.2-1b"
    parser.add_argument("--shape", choices=[*SHAPES, *GEMMAS], default=usual, help=f"({usual})")
    stem = "layers with a table: every third, second, all but the first, none, or numbers (third)"
    choices = "third|half|full|dense|LAYER"
    parser.add_argument("--stem", nargs="+", default=["third"], metavar=choices, help=stem)
    packed = f"as checkpoints trained for phones are ({', '.join(gemma_checkpoint.PACKED)})"
    parser.add_argument("--packed", action="store_true", help=packed)
    args = parser.parse_args()
    if args.packed and args.shape not in gemma_checkpoint.PACKED:
        parser.error(f"--packed: expected --shape {' or '.join(gemma_checkpoint.PACKED)}")
    if args.shape in GEMMAS:
        write_gemma(args.out, describe(args.shape, packed=args.packed))
        print(f"{args.out}: done; next: stem-edge export {args.out} BUNDLE")
        return
    shape = SHAPES[args.shape]
    if args.stem[0].isdigit():
        layers = tuple(sorted(map(int, args.stem)))
    else:
        layers = stem_layers(args.stem[0], shape.n_layers)
    write_checkpoint(args.out, replace(shape, stem_layers=layers), parts=4, dtype="bf16")
    print(f"{args.out}: done; next: stem-edge export {args.out} BUNDLE")


if __name__ == "__main__":
    main()
