"""States that a power cut may leave: file operations are recorded, then replayed with losses.

The model is harsher than any file system. Bytes are safe only after their file is synced, a name only
after its folder is. Of all else, any part may have reached the medium: any subset of the names, and of
each write nothing, all, zeros of its size, or a part that ends at a sector boundary. A rename
within a folder happens as a whole or not at all.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import pytest
from faulty_disk import CHANGES

from stem_edge.files import disk

SECTOR = 512
ROOT = 0  # node of the folder that is watched; it is durable
Tree: TypeAlias = dict[str, bytes | None]  # path below the root -> contents; None for a folder


@dataclass(frozen=True)
class Names:
    """Atomic change of names in one folder: (name, node before, node after)."""

    folder: int
    changes: tuple[tuple[str, int | None, int | None], ...]
    makes: Literal["file", "folder", ""] = ""  # what the node after is, if it is new


@dataclass(frozen=True)
class Data:
    """A write."""

    node: int
    offset: int
    data: bytes


@dataclass(frozen=True)
class Sync:
    """A sync, after which all changes of a file or folder are on the medium."""

    node: int


Op: TypeAlias = Names | Data | Sync


@dataclass
class Medium:
    """Files and folders by node number, because names can vanish and come back."""

    folders: dict[int, dict[str, int]] = field(default_factory=lambda: {ROOT: {}})
    files: dict[int, bytes] = field(default_factory=dict)

    def copy(self) -> Medium:
        """Return an independent copy."""
        return Medium({n: dict(names) for n, names in self.folders.items()}, dict(self.files))

    def apply(self, op: Names | Data) -> None:
        """Apply a change; removing a name is skipped if an earlier change of it was lost."""
        if isinstance(op, Data):
            old = self.files[op.node].ljust(op.offset, b"\0")
            self.files[op.node] = old[: op.offset] + op.data + old[op.offset + len(op.data) :]
            return
        names = self.folders[op.folder]
        for name, before, after in op.changes:
            if after is not None:
                names[name] = after
            elif names.get(name) == before:
                del names[name]

    def tree(self, node: int = ROOT, prefix: str = "") -> Tree:
        """Return everything that has a name."""
        found: Tree = {}
        for name, child in self.folders[node].items():
            if child in self.files:
                found[prefix + name] = self.files[child]
            else:
                found[prefix + name] = None
                found |= self.tree(child, f"{prefix}{name}/")
        return found


class Recorder:
    """Log of all operations below a folder that go through stem_edge.files.disk."""

    def __init__(self, root: Path) -> None:
        self.root, self.log = root, list[Op]()
        self._now, self._open = Medium(), dict[int, int]()  # descriptor -> node
        self._number, self._lock = ROOT, threading.Lock()
        self._scan(root, ROOT)
        self.before = self._now.copy()

    def _scan(self, folder: Path, node: int) -> None:
        for path in sorted(folder.iterdir()):
            child = self._now.folders[node][path.name] = self._new(path.is_dir())
            if path.is_dir():
                self._scan(path, child)
            else:
                self._now.files[child] = path.read_bytes()

    def _new(self, is_folder: bool) -> int:
        self._number += 1
        if is_folder:
            self._now.folders[self._number] = {}
        else:
            self._now.files[self._number] = b""
        return self._number

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Start recording."""
        for name in (*CHANGES, "close"):
            self._wrap(patch, name)

    def _wrap(self, patch: pytest.MonkeyPatch, name: str) -> None:
        call, record = getattr(disk, name), getattr(self, f"_{name}")

        def recorded(*arguments: Any) -> Any:
            with self._lock:
                result = call(*arguments)
                record(result, *arguments)
                return result

        patch.setattr(disk, name, recorded)

    def _place(self, path: Path) -> tuple[int, str] | None:
        """Return folder and name of a path; None outside of the root."""
        if not path.is_relative_to(self.root) or path == self.root:
            return None
        node = ROOT
        for name in path.relative_to(self.root).parts[:-1]:
            node = self._now.folders[node][name]
        return node, path.name

    def _node(self, path: Path) -> int | None:
        if path == self.root:
            return ROOT
        place = self._place(path)
        return None if place is None else self._now.folders[place[0]].get(place[1])

    def _do(self, op: Op) -> None:
        self.log.append(op)
        if not isinstance(op, Sync):
            self._now.apply(op)

    def _change(
        self, path: Path, after: int | None, makes: Literal["file", "folder", ""] = ""
    ) -> None:
        """Record that a name now stands for another node."""
        if (place := self._place(path)) is not None:
            folder, name = place
            self._do(Names(folder, ((name, self._now.folders[folder].get(name), after),), makes))

    def _create(self, descriptor: int, path: Path) -> None:
        if self._place(path) is not None:
            node = self._open[descriptor] = self._new(False)
            self._change(path, node, "file")

    def _append(self, descriptor: int, path: Path) -> None:
        if (node := self._node(path)) is not None:
            self._open[descriptor] = node

    def _write(self, count: int, descriptor: int, data: memoryview) -> None:
        if (node := self._open.get(descriptor)) is not None:
            self._do(Data(node, len(self._now.files[node]), bytes(data[:count])))

    def _fsync(self, _: None, descriptor: int) -> None:
        if (node := self._open.get(descriptor)) is not None:
            self._do(Sync(node))

    def _close(self, _: None, descriptor: int) -> None:
        self._open.pop(descriptor, None)

    def _make_folder(self, _: None, path: Path) -> None:
        self._change(path, self._new(True), "folder")

    def _rename(self, _: None, source: Path, target: Path) -> None:
        one, other = self._place(source), self._place(target)
        if one is None and other is None:
            return
        assert one is not None and other is not None and one[0] == other[0], "within a folder"
        names = self._now.folders[one[0]]
        node, replaced = names[one[1]], names.get(other[1])
        self._do(Names(one[0], ((one[1], node, None), (other[1], replaced, node))))

    def _remove(self, _: None, path: Path) -> None:
        if self._node(path) is not None:
            self._change(path, None)

    def _remove_folder(self, _: None, path: Path) -> None:
        self._change(path, None)

    def _sync_folder(self, _: None, path: Path) -> None:
        if (node := self._node(path)) is not None:
            self._do(Sync(node))


@dataclass(frozen=True)
class CrashState:
    """Contents of the medium when the power fails after so many operations."""

    after: int
    tree: Tree

    @property
    def key(self) -> int:
        """Hash of the contents, to skip states that were seen before."""
        return hash(frozenset(self.tree.items()))


def crash_states(
    before: Medium, log: Sequence[Op], each: int, rng: random.Random
) -> Iterator[CrashState]:
    """Yield states after every prefix of a log, `each` per prefix, one where nothing is pending.

    Of the pending operations, a state has none, all, only names, zeros for data, or a random choice.
    """
    durable, pending = before.copy(), list[Names | Data]()
    for after in range(len(log) + 1):
        count = each if pending else 1
        for choice in range(count):
            yield CrashState(after, _left(durable, pending, _chooser(choice, rng)))
        if after < len(log):
            op = log[after]
            if isinstance(op, Sync):
                pending = _settle(durable, pending, op.node)
            else:
                _introduce(durable, op)
                pending.append(op)


def _introduce(durable: Medium, op: Names | Data) -> None:
    """Create a new file or folder, empty and still without a name."""
    if isinstance(op, Names) and op.makes:
        (node,) = [after for _, _, after in op.changes if after is not None]
        if op.makes == "file":
            durable.files[node] = b""
        else:
            durable.folders[node] = {}


def _settle(durable: Medium, pending: list[Names | Data], node: int) -> list[Names | Data]:
    rest = []
    for op in pending:
        if node == (op.node if isinstance(op, Data) else op.folder):
            durable.apply(op)
        else:
            rest.append(op)
    return rest


def _left(
    durable: Medium,
    pending: Sequence[Names | Data],
    choose: Callable[[Names | Data], Names | Data | None],
) -> Tree:
    medium = durable.copy()
    for op in pending:
        if (kept := choose(op)) is not None:
            medium.apply(kept)
    return medium.tree()


def _chooser(choice: int, rng: random.Random) -> Callable[[Names | Data], Names | Data | None]:
    match choice:
        case 0:
            return lambda op: None
        case 1:
            return lambda op: op
        case 2:
            return lambda op: op if isinstance(op, Names) else None
        case 3:
            return lambda op: op if isinstance(op, Names) else _zeros(op)
        case 4:
            return lambda op: op if isinstance(op, Names) else _torn(op, rng)
    share = rng.random()
    return lambda op: _any_part(op, rng, share)


def _any_part(op: Names | Data, rng: random.Random, share: float) -> Names | Data | None:
    if rng.random() > share:
        return None
    if isinstance(op, Names):
        return op
    return rng.choice([op, _zeros(op), _torn(op, rng)])


def _zeros(op: Data) -> Data:
    return Data(op.node, op.offset, bytes(len(op.data)))


def _torn(op: Data, rng: random.Random) -> Data:
    """Cut a write at a sector boundary, with or without zeros after it."""
    border = min(len(op.data), SECTOR * rng.randrange(len(op.data) // SECTOR + 1))
    rest = bytes(len(op.data) - border) if rng.random() < 0.5 else b""
    return Data(op.node, op.offset, op.data[:border] + rest)


def write_tree(tree: Tree, folder: Path) -> None:
    """Write a state into an empty folder."""
    for name, data in sorted(tree.items()):
        if data is None:
            (folder / name).mkdir()
        else:
            (folder / name).write_bytes(data)


def below(tree: Tree, folder: str) -> Tree | None:
    """Return the part of a tree below a folder; None if there is no such folder."""
    if folder not in tree:
        return None
    start = folder + "/"
    return {name[len(start) :]: data for name, data in tree.items() if name.startswith(start)}
