"""What is computed here beside what a bundle is and takes on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from scale_machines import CORE_FLOPS
from scale_rates import WEIGHTS_SHARE
from scale_steps import ROWS_RATE, Machine, step_of
from scale_tables import Table
from scale_text import Reads, run_cache

from stem_edge import load
from stem_edge.bundle.footprint import Footprint, expected_footprint, footprint_of
from stem_edge.bundle.manifest import TABLES, FileEntry
from stem_edge.bundle.opening import open_bundle
from stem_edge.errors import InputError
from stem_edge.graph.decode import BACKBONE_DATA, PREFILL_DATA
from stem_edge.measuring.planning.bandwidth import measured
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
    computed = expected_footprint(manifest.model, manifest.backbone, manifest.table_format)
    table = Table("", "computed", "found")
    add_sizes(table, computed, manifest.files)
    add_rates(table, opened.file(TABLES), manifest.table_format, ids)
    for batch in BATCHES:
        add_run(table, bundle, footprint_of(manifest), ids, batch, slots)
    return table


def add_sizes(table: Table, computed: Footprint, files: Mapping[str, FileEntry]) -> None:
    """Add the sizes of the bundle's parts."""
    found = {name: file.nbytes for name, file in files.items()}
    shards = sum(size for name, size in found.items() if name.startswith(TABLES) and "/c/" in name)
    table.add("backbone, bytes", computed.backbone_nbytes, found[BACKBONE_DATA])
    table.add("matrices for prompts, bytes", computed.prefill_nbytes, found.get(PREFILL_DATA, 0))
    table.add("tables, bytes", computed.tables_nbytes, shards)


def add_rates(table: Table, root: Path, format: TableFormat, ids: I64) -> None:
    """Add how fast the runtime takes records that are in the page cache."""
    one = row_rates(root, format, ids[:1])[0]
    read, write = row_rates(root, format, np.unique(ids)[:RECORDS])
    table.add("reading and checking one record in the page cache, GB/s", "", one / 1e9)
    table.add(f"reading and checking {RECORDS} records, GB/s", "", read / 1e9)
    table.add("putting them into slots, GB/s", "", write / 1e9)
    table.add("both, GB/s", ROWS_RATE / 1e9, 1 / (1 / read + 1 / write) / 1e9)


def add_run(table: Table, bundle: Path, sizes: Footprint, ids: I64, batch: int, slots: int) -> None:
    """Add rows and speed of so many sequences that decode together."""
    texts = texts_of(ids.tolist(), batch, PROMPT, NEW)
    reads = simulate_together(texts[:batch], slots, sizes.model.records)
    rate = WEIGHTS_SHARE * measured(usable_cpus())
    step = step_of(this_machine(rate), sizes, PROMPT + NEW // 2, reads, 0)
    found = decode(bundle, texts, batch, slots)
    rows = reads.distinct_per_step, found["distinct_rows_per_step"]
    name = f"{batch} sequences: "
    table.add(name + "weights, GB/s", "", rate / 1e9)
    table.add(name + "distinct rows a step", *rows)
    table.add(name + "rows read a token", reads.read_per_token, found["rows_read_per_token"])
    table.add(name + "tok/s", batch / step.seconds, found["tokens_per_second"])


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
    """Decode these texts together, as `stem-edge bench --cases` does."""
    with load(bundle, slots=slots, sequences=batch + 1, warm_start=False) as model:
        return decode_together(model, texts, batch).figures()


def row_rates(root: Path, format: TableFormat, numbers: I64) -> tuple[float, float]:
    """Return the bytes a second of reading records by their numbers, and of putting them into slots."""
    slots = ArraySlots(format.tables, len(numbers))
    places = np.arange(len(numbers), dtype=np.intp)
    with open_store(root, format) as store:
        records = store.read(numbers)
        read = timed(lambda: store.read(numbers))
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
