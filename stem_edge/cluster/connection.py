"""Connection to a Ray cluster, and what Ray raises as errors of this project."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from stem_edge.errors import StemEdgeError
from stem_edge.files.strict_json import one_line
from stem_edge.shown import shown
from stem_edge.system.memory import usable_cpus

AUTO, LOCAL = "auto", "local"
ANSWER_SECONDS = 10
# Of a cluster that lives as long as the command: rows, results and descriptions of work are small.
LOCAL_STORE_NBYTES = 128 << 20


@contextmanager
def connect(address: str) -> Iterator[Any]:
    """Connect this process to a cluster for the time of a `with` block, and yield ray.

    address: "auto" for the cluster that runs here, its head's host:port, or "local" to start one of
    this machine alone, which ends with the block. A connection that the process already has is used,
    and stays. Raises StemEdgeError.
    """
    ray = _import_ray()
    if ray.is_initialized():
        yield ray
        return
    try:
        with _signals_kept():
            _start(ray, address)
        yield ray
    finally:
        ray.shutdown()


def _import_ray() -> Any:
    # Ray would count uses and send them off; its processes inherit this setting.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise StemEdgeError(
            f"ray is not installed ({error}); install it with: pip install 'stem-edge[ray]'"
        ) from error
    return ray


def _start(ray: Any, address: str) -> None:
    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    try:
        if address == LOCAL:
            ray.init(
                LOCAL,
                num_cpus=usable_cpus(),
                object_store_memory=LOCAL_STORE_NBYTES,
                include_dashboard=False,
                **quiet,
            )
        else:
            if address != AUTO:
                _check_listens(address)  # because Ray itself tries for minutes
            ray.init(address, **quiet)
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise StemEdgeError(
            f"ray {shown(address)}: cannot connect ({one_line(error)}); give the host:port of a "
            "cluster that ray start --head began, auto for the one on this machine, or local"
        ) from error


def _check_listens(address: str) -> None:
    """Raise OSError or ValueError unless something listens at host:port."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host, int(port)), ANSWER_SECONDS).close()


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Keep this process's answer to SIGTERM, because ray.init replaces it.

    Ray's processes see that this process is gone, and end, too.
    """
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread() and before is not None:
            signal.signal(signal.SIGTERM, before)


@contextmanager
def own_errors(ray: Any) -> Iterator[None]:
    """Raise what a worker raised as if it were raised here, and what Ray raises as StemEdgeError."""
    try:
        yield
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, (StemEdgeError, OSError)):
            raise error.cause from None
        raise
    except ray.exceptions.RayError as error:
        raise StemEdgeError(
            f"ray: {one_line(error)}; look at the cluster with ray status, and start again: what is "
            "finished is kept"
        ) from error
