"""What is computed here beside what a bundle is and takes on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from scale_machines import CORE_FLOPS
from scale_steps import ROWS_RATE, Machine, step_of
from scale_tables import Table
from scale_text import Reads, run_cache

from stem_edge import load
from stem_edge.bundle.footprint import expected_footprint, footprint_of
from stem_edge.bundle.manifest import TABLES, Manifest, open_bundle
from stem_edge.errors import InputError
from stem_edge.graph.decode import BACKBONE_DATA, PREFILL_DATA
from stem_edge.measuring.planning.rates import WEIGHTS_SHARE, measure_rates
from stem_edge.measuring.run.stem_steps import decode_together
from stem_edge.measuring.run.together import Text, texts_of
from stem_edge.numerics.quantize import I64
from stem_edge.runtime.rows.emulated_flash import FlashProfile
from stem_edge.runtime.rows.slots import ArraySlots
from stem_edge.runtime.rows.store import open_store
from stem_edge.system.memory import usable_cpus
from stem_edge.tables.store import TableFormat

RECORDS, ROUNDS = 16, 200  # records of a read; more take longer than a busy system lets run
BATCHES, PROMPT, NEW = (1, 8), 64, 96  # sequences, and the tokens of each
PAGE_CACHE = FlashProfile(1e12, 0.0, 1)  # its speed is in ROWS_RATE


def check(bundle: Path, ids: I64, slots: int) -> Table:
    """Sizes, hit rates and speeds as computed and simulated, beside those of a bundle on this machine."""
    opened = open_bundle(bundle)
    manifest = opened.manifest
    if manifest.backbone is None or manifest.table_format is None:
        raise InputError(f"{bundle}: expected a bundle for onnxruntime with tables")
    table = Table("", "computed", "found")
    add_sizes(table, manifest)
    read, write = row_rates(opened.file(TABLES), manifest.table_format, ids)
    table.add("reading and checking records in the page cache, GB/s", "", read / 1e9)
    table.add("putting them into slots, GB/s", "", write / 1e9)
    table.add("both, GB/s", ROWS_RATE / 1e9, 1 / (1 / read + 1 / write) / 1e9)
    for batch in BATCHES:
        texts = texts_of(ids.tolist(), batch, PROMPT, NEW)
        reads = simulate_together(texts[:batch], slots, manifest.model.records)
        rate = measure_rates(footprint_of(manifest), usable_cpus()).weights
        step = step_of(this_machine(rate), footprint_of(manifest), PROMPT + NEW // 2, reads, 0)
        found = decode(bundle, texts, batch, slots)
        name = f"{batch} sequences: "
        table.add(name + "weights, GB/s", "", rate / 1e9)
        table.add(
            name + "distinct rows a step", reads.distinct_per_step, found["distinct_rows_per_step"]
        )
        table.add(name + "rows read a token", reads.read_per_token, found["rows_read_per_token"])
        table.add(name + "tok/s", batch / step.seconds, found["tokens_per_second"])
    return table


def add_sizes(table: Table, manifest: Manifest) -> None:
    """Add the sizes of the bundle's parts."""
    if manifest.backbone is None or manifest.table_format is None:
        return
    computed = expected_footprint(manifest.model, manifest.backbone, manifest.table_format)
    files = {name: file.nbytes for name, file in manifest.files.items()}
    shards = sum(size for name, size in files.items() if name.startswith(TABLES) and "/c/" in name)
    table.add("backbone, bytes", computed.backbone_nbytes, files[BACKBONE_DATA])
    table.add("matrices for prompts, bytes", computed.prefill_nbytes, files.get(PREFILL_DATA, 0))
    table.add("tables, bytes", computed.tables_nbytes, shards)


def this_machine(weights: float) -> Machine:
    """Describe this machine, of which the rate of reading weights was timed."""
    cpus = usable_cpus()
    return Machine("here", 1 << 62, weights / WEIGHTS_SHARE, cpus * CORE_FLOPS, PAGE_CACHE, 0)


def simulate_together(texts: Sequence[Text], slots: int, records: int) -> Reads:
    """Simulate sequences whose prompts are computed one after the other, and which then decode."""
    prompts = [np.array(text.prompt) for text in texts]
    answers = np.array([text.answer[:NEW] for text in texts])
    return run_cache([*prompts, *answers.T], slots, records=records).part(len(texts))


def decode(bundle: Path, texts: list[Text], batch: int, slots: int) -> dict[str, float]:
    """Decode these texts together, as `stem-edge bench --batches` does."""
    with load(bundle, slots=slots, sequences=batch + 1, warm_start=False) as model:
        return decode_together(model, texts, batch).figures()


def row_rates(root: Path, format: TableFormat, ids: I64) -> tuple[float, float]:
    """Return the bytes a second of reading records, and of writing them into slots."""
    wanted = np.unique(ids)[:RECORDS]
    slots = ArraySlots(format.tables, len(wanted))
    places = np.arange(len(wanted), dtype=np.intp)
    with open_store(root, format) as store:
        records = store.read(wanted)
        read = timed(lambda: store.read(wanted))
        write = timed(lambda: slots.write(places, records))
    return records.size / read, records.size / write


def timed(run: Callable[[], object]) -> float:
    """Return the least seconds of a run, because others may use the machine."""
    times = list[float]()
    for _ in range(ROUNDS):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return min(times)
