"""What tools/device_table.py measures: bundles of random weights, and tokens as a text has them."""

from __future__ import annotations

import re
import shutil
import sys
import threading
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
from make_checkpoint import SHAPES, Shape, stem_layers, write_checkpoint

from stem_edge import export_bundle
from stem_edge.bundle import Bundle
from stem_edge.errors import InputError
from stem_edge.measuring.workload import DEFAULT_TEXT, read_ids
from stem_edge.progress import Progress
from stem_edge.units import format_size

Tables = Literal["int8", "int4"]
RATIOS = ("third", "full")
VALUE_NBYTES = 2  # of a checkpoint in bf16
NBYTES_WITH_SCALES: dict[Tables, float] = {"int8": 1.03, "int4": 0.57}  # of a value in a row
BLOCK_NBYTES = 512  # in which st_blocks counts, on every system
PARTS = 4  # column shards of a checkpoint, each a file that is mapped whole
WATCH_SECONDS = 0.5
LONG_NBYTES = 10**9
# A tokenizer of bytes uses no more tokens than this, however many the vocabulary has.
FEW_TOKENS, LARGE_VOCABULARY = 300, 3000
# Words that are used as often as this in the text are in any text; others come and go.
COMMON = 3
WORDS = re.compile(r"\w+|[^\w\s]")


def make_bundles(folder: Path, shape: str, tables: Tables) -> list[Path]:
    """Bundles STEM-1/3 and STEM-full of a shape; those that are there already are taken.

    Raises InputError if the disk is too small.
    """
    made = []
    for ratio in RATIOS:
        out = folder / f"{shape}-{ratio}-{tables}"
        made.append(out)
        if not (out / "manifest.json").is_file():
            layers = stem_layers(ratio, SHAPES[shape].n_layers)
            _make(out, replace(SHAPES[shape], stem_layers=layers), tables)
    return made


def _make(out: Path, shape: Shape, tables: Tables) -> None:
    backbone = VALUE_NBYTES * sum(map(prod, shape.backbone().values()))
    rows = shape.vocab_size * shape.d_ff * len(shape.stem_layers)
    checkpoint = backbone + VALUE_NBYTES * rows
    bundle = int(backbone / 2 + NBYTES_WITH_SCALES[tables] * rows)
    out.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(out.parent).free
    what = (
        f"{out}: {format_size(checkpoint)} for a checkpoint, which is removed again, and "
        f"{format_size(bundle)} for the bundle"
    )
    if free < checkpoint + bundle:
        raise InputError(f"{what}; {format_size(free)} are free: give --make another folder")
    print(what + ("; takes minutes" if checkpoint > LONG_NBYTES else ""), file=sys.stderr)
    source = out.with_name(out.name + ".checkpoint")
    shutil.rmtree(source, ignore_errors=True)  # of a run that was cut off
    try:
        with _watching(source, checkpoint):
            write_checkpoint(source, shape, dtype="bf16", parts=PARTS)
        export_bundle(source, out, tables=tables, quantizer="rtn", prefill_graph=False)
    finally:
        shutil.rmtree(source, ignore_errors=True)


@contextmanager
def _watching(folder: Path, nbytes: int) -> Iterator[None]:
    """A progress bar by what is on the disk: files are made at their full size, and filled later."""
    done = threading.Event()

    def watch(bar: Progress) -> None:
        seen = 0
        while not done.wait(WATCH_SECONDS):
            files = [path.stat() for path in folder.rglob("*") if path.is_file()]
            now = sum(getattr(s, "st_blocks", s.st_size // BLOCK_NBYTES) for s in files)
            bar.advance(BLOCK_NBYTES * (now - seen))
            seen = now

    with Progress(nbytes, "random checkpoint", None) as bar:
        thread = threading.Thread(target=watch, args=(bar,))
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


def tokens_of(bundle: Bundle, text: Path | None, count: int) -> tuple[npt.NDArray[np.int64], str]:
    """Token ids, and where they come from in words.

    Of the file, or of the text inside the package. Random bundles have a tokenizer of bytes, which
    would use 1 of 1000 rows: for them, each word of the text is a token. The text is short, so it is
    repeated until there are `count` ids, with other tokens for its rare words each time.
    """
    source = DEFAULT_TEXT if text is None else text
    ids, vocab_size = read_ids(source, bundle), bundle.manifest.model.vocab_size
    if text is not None:
        return np.array(ids), text.name
    if vocab_size < LARGE_VOCABULARY or len(set(ids)) > FEW_TOKENS:
        return np.array(ids), "the text inside the package"
    words = WORDS.findall(DEFAULT_TEXT.read_text("utf-8"))
    common = {word for word, uses in Counter(words).items() if uses >= COMMON}
    found = [
        zlib.crc32((word if word in common else f"{time} {word}").encode()) % vocab_size
        for time in range(-(-count // len(words)))
        for word in words
    ]
    return np.array(found), "words of the text inside the package, rare ones anew each time"
