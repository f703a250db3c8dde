"""A Ray cluster of several nodes on this machine, of which all but the first can be killed."""

from __future__ import annotations

from typing import Any

import psutil
import pytest

from stem_edge.apps.batches import on_ray

NODE = {
    "num_cpus": 1,
    "memory": 4 << 30,
    "object_store_memory": 80 << 20,
    "include_dashboard": False,
}


class Nodes:
    """Nodes of a cluster, each with processes of its own."""

    def __init__(self) -> None:
        utils = pytest.importorskip("ray.cluster_utils")
        self._cluster: Any = utils.Cluster(initialize_head=True, head_node_args=NODE)
        self.address: str = self._cluster.address
        self.set(3)

    def set(self, count: int) -> None:
        """Start or end nodes until there are so many."""
        while len(self._cluster.worker_nodes) + 1 < count:
            self._cluster.add_node(**NODE)
        while len(self._cluster.worker_nodes) + 1 > count:
            self.kill()
        self._cluster.wait_for_nodes()

    def kill(self) -> None:
        """Kill all processes of a node, as when its power is cut."""
        self._cluster.remove_node(next(iter(self._cluster.worker_nodes)), allow_graceful=False)

    def kill_process(self) -> None:
        """Kill a process that works on a piece, as when memory is short; its node goes on."""
        below = psutil.Process().children(recursive=True)
        next(
            each
            for each in below
            if f"ray::{on_ray._answer_rows.__name__}" in "".join(each.cmdline())
        ).kill()

    def end(self) -> None:
        """End all processes."""
        self._cluster.shutdown()
