"""Time decoding and prompts after many tokens, and the memory that they take.

    python tools/bench/bench_depth.py model --depths 4096 16384 32768 65536
    python tools/bench/bench_depth.py model.gguf --kv q8_0 --depths 4096 16384

Computing a long prompt may take hours. So a short one is computed, and its keys and values are
copied behind it until the context is as full as wanted: the bytes that attention reads lie where
they would, and have values that occur. The text that follows makes no sense, which costs no time.
A file that ends in .gguf runs on llama.cpp (pip install 'stem-edge[bench]').
"""

from __future__ import annotations

import argparse
import time
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, Protocol

import numpy as np

import stem_edge
from stem_edge.graph import names as io
from stem_edge.runtime.backends.ggml.backend import GgmlContext
from stem_edge.runtime.backends.ggml.kv_cache import rounded
from stem_edge.runtime.backends.onnxruntime.context import OrtContext, _Shift
from stem_edge.system.memory import own_memory, usable_cpus
from stem_edge.text_table import table
from stem_edge.units import format_rate, format_size

DEPTHS = (4096, 16_384, 32_768, 65_536)


class Depth(NamedTuple):
    """Results after a number of tokens."""

    tokens: int
    decode: float  # seconds a token, the median
    prompt: float  # seconds a token
    memory: int  # anonymous memory of the process, in bytes


class Subject(Protocol):
    """A model with one context."""

    def fill(self, tokens: int) -> None:
        """Begin again, with a context of `tokens` tokens."""

    def rewind(self, tokens: int) -> None:
        """Forget all but the first tokens."""

    def choose(self, token_ids: list[int]) -> int:
        """Process ids after those before, and return the most probable next one."""

    def close(self) -> None:
        """Release what does not go with the object."""
        return


class StemEdge(Subject):
    """A bundle."""

    def __init__(self, path: str, seed: list[int], context: int, options: dict[str, Any]) -> None:
        self.model = stem_edge.load(path, context_length=context, **options)
        self.engine, self._length, self._seed = self.model.engine, context, seed

    def fill(self, tokens: int) -> None:
        self._context = self.engine.open_context(self._length)
        self.choose(self._seed)
        fill(self._context.backend, len(self._seed), tokens)
        self._context.position = tokens

    def rewind(self, tokens: int) -> None:
        self._context.rewind(tokens)
        if self._context.position != tokens:  # its windows have gone
            self.fill(tokens)

    def choose(self, token_ids: list[int]) -> int:
        if len(token_ids) == 1:
            return int(self.engine.step(self._context, np.array(token_ids), top=1)[0].argmax())
        for logits in self.engine.process(self._context, token_ids, top=1):
            best = int(logits[0].argmax())
        return best

    def close(self) -> None:
        self.model.close()


class Llama(Subject):
    """A GGUF file on llama.cpp."""

    def __init__(self, path: str, seed: list[int], context: int, threads: int, kv: str) -> None:
        from stem_edge.ggml import types as ggml_types
        from stem_edge.measuring.bench.engine_llama import LlamaModel

        kinds = {"f32": ggml_types.F32, "f16": ggml_types.F16, "q8_0": ggml_types.Q8_0}
        kinds |= {"q4_0": ggml_types.Q4_0}
        if kv not in kinds:
            raise SystemExit(f"--kv is {kv!r}; llama.cpp takes {', '.join(kinds)}")
        self._seed = seed
        self._model = LlamaModel(path, context, threads, kv_type=kinds[kv], sequences=2)

    def fill(self, tokens: int) -> None:
        self._model.clear()
        self._model.process(self._seed)
        self._last = self._model.last
        self._model.fill(tokens)

    def rewind(self, tokens: int) -> None:
        self._model.rewind(self._last)

    def choose(self, token_ids: list[int]) -> int:
        return self._model.choose(token_ids)


def fill(context: object, given: int, tokens: int) -> None:
    """Let a context hold `tokens` tokens, by copies of the keys and values of the `given` first."""
    if isinstance(context, OrtContext):
        _fill_arrays(context, given, tokens)
    elif isinstance(context, GgmlContext):
        _fill_cells(context, given, tokens)
    else:
        raise SystemExit("this tool fills the KV cache of the CPU only")


def _fill_arrays(context: OrtContext, given: int, tokens: int) -> None:
    first = max(0, tokens - context.window._window + 1) // io.WINDOW_BLOCK * io.WINDOW_BLOCK
    for array in context.kv.arrays:
        cache = array.host  # [1, heads, rows, width]
        stop = tokens if cache.shape[2] == context.length else min(cache.shape[2], tokens)
        for start in range(given, stop, given):
            end = min(start + given, stop)
            cache[:, :, start:end] = cache[:, :, : end - start]
    context._filled = tokens
    if context.window._heads:
        context.window._shift = _Shift(base=first)


def _fill_cells(context: GgmlContext, given: int, tokens: int) -> None:
    kv, offset = context.kv, 0
    for nbytes, cells in kv._cells:  # of keys and values of a cell together
        for _ in range(2):
            cache = kv._memory._data[offset : offset + nbytes // 2 * cells].reshape(cells, -1)
            for start in range(given, min(cells, tokens), given):
                end = min(start + given, cells, tokens)
                cache[start:end] = cache[: end - start]
            offset += nbytes // 2 * rounded(cells)
    kv.fill(tokens)


def measure(subject: Subject, ids: list[int], depth: int, new: int) -> Depth:
    """Time `new` single tokens after `depth` ones, then all ids as a prompt there."""
    subject.fill(depth)
    subject.choose(ids[:1])  # makes graphs for this length, and arrays for one token
    times = list[float]()
    for token in ids[1 : new + 1]:
        started = time.perf_counter()
        subject.choose([token])
        times.append(time.perf_counter() - started)
    subject.rewind(depth)
    started = time.perf_counter()
    subject.choose(ids)
    prompt = time.perf_counter() - started
    return Depth(depth, median(times), prompt / len(ids), own_memory())


def random_ids(vocab_size: int, count: int) -> list[int]:
    """Return ids that are as rare as words: most of them are among the first."""
    found = np.random.default_rng(0).zipf(1.2, count) % vocab_size
    return [int(token) for token in found]


def run(args: argparse.Namespace) -> list[Depth]:
    """Measure at each depth."""
    longest = max(args.depths) + max(args.prompt_tokens, args.new_tokens + 1)
    threads, path = args.threads, args.model
    subject: Subject
    if Path(path).suffix == ".gguf":
        ids = random_ids(args.vocab_size, args.prompt_tokens)
        # llama.cpp pads contexts by itself.
        subject = Llama(path, ids, longest, threads or usable_cpus(), args.kv or "f16")
    else:
        vocab_size = stem_edge.open_bundle(path).manifest.model.vocab_size
        ids = random_ids(vocab_size, args.prompt_tokens)
        options = {"engine": args.engine, "threads": threads, "memory": args.memory}
        options |= {"kv": args.kv} if args.kv else {}
        subject = StemEdge(path, ids, longest, options)
    with closing(subject):
        return [measure(subject, ids, depth, args.new_tokens) for depth in args.depths]


def main(argv: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("model", help="a bundle, or a GGUF file for llama.cpp")
    add("--depths", type=int, nargs="+", default=DEPTHS, help="tokens before those that are timed")
    add("--prompt-tokens", type=int, default=512, help="tokens of the prompt that is timed")
    add("--new-tokens", type=int, default=16, help="single tokens that are timed")
    add("--kv", help="type of keys and values: as in stem_edge.load; f32, f16, q8_0 of llama.cpp")
    add("--engine", default="auto")
    add("--threads", type=int)
    add("--memory", help="limit, as in stem_edge.load")
    add("--vocab-size", type=int, default=1000, help="ids for llama.cpp are below this")
    rows = [("tokens before", "decode, tok/s", "prompt, tok/s", "anonymous memory")]
    for one in run(parser.parse_args(argv)):
        speeds = format_rate(1 / one.decode), format_rate(1 / one.prompt)
        rows.append((f"{one.tokens:,}", *speeds, format_size(one.memory)))
    print("\n".join(table(rows, "r")))


if __name__ == "__main__":
    main()
