"""Exports on a cluster: the shards of the tables are written by all machines, on one disk."""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial

from stem_edge.cluster.sharing import Work, share
from stem_edge.export.job.journal import JournalStep
from stem_edge.export.shards import Elsewhere, ShardTask

PROCESS_NBYTES = 512 << 20  # of a process of Ray that has imported what writes shards, at most


def ray_shards(address: str = "auto") -> Elsewhere:
    """Return a function that writes an export's shards on a cluster, for `elsewhere` of export_bundle.

    address: "auto" for the cluster that runs here, its host:port, or "local" for this machine alone.
    Checkpoint and target must be on a disk that every machine has under the same path.
    """
    return partial(_write, address)


def _write(address: str, shards: ShardTask) -> Generator[JournalStep]:
    work = Work(partial(_open, shards), lambda cpus: shards.nbytes(cpus) + PROCESS_NBYTES)
    return share(address, work, shards.names)


def _open(shards: ShardTask, cpus: int) -> Callable[[str], JournalStep]:
    return partial(shards.write, tables=shards.open(), threads=cpus)
