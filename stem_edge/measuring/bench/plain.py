"""The usual case: one sequence, whose prompt and following tokens come from a text."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

from stem_edge.bundle.footprint import SLOT_BOOKKEEPING_NBYTES, footprint_of
from stem_edge.bundle.manifest import TABLES
from stem_edge.bundle.opening import Bundle
from stem_edge.graph.kv import KvChoice
from stem_edge.measuring.bench.cases import Cases, Key, Results, Run
from stem_edge.measuring.bench.figures import Round, figures_of, ratios
from stem_edge.measuring.bench.subjects import on_device
from stem_edge.measuring.bench.workers import WorkerProcess
from stem_edge.measuring.workload import DEFAULT_TEXT, make_workload, read_ids
from stem_edge.runtime.backends.engines import ENGINES
from stem_edge.runtime.backends.options import LoadOptions
from stem_edge.system.page_cache import drop_pages, files_in

SHORT_PROMPT = 16  # tokens, for the time from nothing to a first token


def plain(
    bundle: Bundle,
    engine: str,
    given: LoadOptions,
    sizes: tuple[str | Path | None, int | None, int | None, int | None],
    *,
    cold: bool,
) -> Cases[Round]:
    """Return the case of a bundle on an engine. Raises InputError.

    sizes: text, tokens of prompt and answer, context length. cold: decode with no tables cached.
    """
    work = make_workload(bundle, *sizes)
    ids = read_ids(DEFAULT_TEXT if sizes[0] is None else Path(sizes[0]), bundle)
    prompt, turns = len(work.prompt), count()

    def begin() -> Run[Round]:
        start = next(turns) % (len(ids) // work.tokens) * work.tokens
        return lambda worker: {"": _round(worker, ids[start : start + work.tokens])}

    def _round(worker: WorkerProcess, text: list[int]) -> Round:
        before, tables = worker.counters, Path(worker.subject.path) / TABLES
        if cold:
            drop_pages(files_in(tables))
        prefill = worker.prefill(text[:prompt])
        if cold:
            drop_pages(files_in(tables))
        return Round(prompt, before, prefill, worker.decode(text[prompt:]))

    def sum_up(results: Results[Round]) -> Mapping[str, Any]:
        subjects = {
            name: figures_of(rounds, watched)
            for name, watched in results.watched.items()
            if (rounds := results.found.get(Key(name), []))
        }
        nbytes = token_nbytes(bundle, engine, prompt + len(work.following) // 2, given.kv)
        mine, rates = next(iter(subjects.values())).rounds["median_step"], results.bandwidth
        reached = [step * nbytes / rate for step, rate in zip(mine, rates, strict=bool(rates))]
        return {
            "subjects": subjects,
            "ratios": ratios(subjects),
            "bandwidth": rates,
            "token_nbytes": nbytes,
            "bandwidth_reached": median(reached) if reached else None,
            "failed": results.failed,
        }

    return Cases(
        {"": begin},
        sum_up,
        *(work.source, prompt, len(work.following), work.tokens),
        bandwidth=not on_device(vars(given)),
        short=ids[: min(SHORT_PROMPT, prompt)],
    )


def token_nbytes(bundle: Bundle, engine: str, position: int, kv: KvChoice = "auto") -> int:
    """Return the bytes that a decode step at this position reads from memory.

    kv: type of keys and values, as in stem_edge.load.
    """
    footprint = footprint_of(bundle.manifest, ENGINES[engine].backbone).with_kv(kv)
    record = 0 if footprint.tables is None else footprint.slot_nbytes - SLOT_BOOKKEEPING_NBYTES
    return footprint.step_nbytes + footprint.kv_read_nbytes(position) + record
