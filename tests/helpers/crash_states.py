"""What a power cut may leave: the calls of an export are recorded and replayed with losses.

The model is harsher than any file system. Bytes count only after their file was synced, a name only
after its folder was. Of what was not synced, any part may have reached the medium: any subset of
the names; of each write nothing, all, zeros of its size, or a part that ends at a sector's border.
A rename or exchange of names within a folder happens as a whole or not at all.
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
ROOT = 0  # the folder that is watched; it is durable
Tree: TypeAlias = dict[str, bytes | None]  # path below the root -> contents, None of a folder


@dataclass(frozen=True)
class Names:
    """Changes of names in one folder, all at once: (name, node before, node after)."""

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
    """All changes of this file or folder are on the medium."""

    node: int


Op: TypeAlias = Names | Data | Sync


@dataclass
class Medium:
    """Files and folders by numbers, as names can go and come back."""

    folders: dict[int, dict[str, int]] = field(default_factory=lambda: {ROOT: {}})
    files: dict[int, bytes] = field(default_factory=dict)

    def copy(self) -> Medium:
        """Another one with the same contents."""
        return Medium({n: dict(names) for n, names in self.folders.items()}, dict(self.files))

    def apply(self, op: Names | Data) -> None:
        """A change; of names as far as it still makes sense after what was lost."""
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
        """Everything that has a name."""
        found: Tree = {}
        for name, child in self.folders[node].items():
            if child in self.files:
                found[prefix + name] = self.files[child]
            else:
                found[prefix + name] = None
                found |= self.tree(child, f"{prefix}{name}/")
        return found


class Recorder:
    """Records what happens below a folder, through stem_edge.files.disk, as a list of operations."""

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
        """Record from here on."""
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
        """Folder and name; None outside of the root."""
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
        """One name stands for another node from here on."""
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
        self._move(source, target, exchanged=False)

    def _exchange(self, done: bool, first: Path, second: Path) -> None:
        if done:
            self._move(first, second, exchanged=True)

    def _move(self, source: Path, target: Path, *, exchanged: bool) -> None:
        """The source's node under the target's name, and in an exchange the other way round."""
        one, other = self._place(source), self._place(target)
        if one is None and other is None:
            return
        assert one is not None and other is not None and one[0] == other[0], "within a folder"
        names = self._now.folders[one[0]]
        node, replaced = names[one[1]], names.get(other[1])
        back = replaced if exchanged else None
        self._do(Names(one[0], ((one[1], node, back), (other[1], replaced, node))))

    def _link(self, _: None, source: Path, target: Path) -> None:
        self._change(target, self._node(source))

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
    """What is on the medium when the power went after so many operations."""

    after: int
    tree: Tree

    @property
    def key(self) -> int:
        """The same for the same contents."""
        return hash(frozenset(self.tree.items()))


def crash_states(
    before: Medium, log: Sequence[Op], each: int, rng: random.Random
) -> Iterator[CrashState]:
    """States after every prefix of a log: nothing of what is pending, all of it, names alone,
    zeros for data, and random choices; `each` of them at a prefix, fewer where little is pending."""
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
    """A new file or folder exists from here on, empty and without a name."""
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
    """A part that ends at a sector's border, with or without zeros after it."""
    border = min(len(op.data), SECTOR * rng.randrange(len(op.data) // SECTOR + 1))
    rest = bytes(len(op.data) - border) if rng.random() < 0.5 else b""
    return Data(op.node, op.offset, op.data[:border] + rest)


def write_tree(tree: Tree, folder: Path) -> None:
    """Put a state on a real disk, into an empty folder."""
    for name, data in sorted(tree.items()):
        if data is None:
            (folder / name).mkdir()
        else:
            (folder / name).write_bytes(data)


def below(tree: Tree, folder: str) -> Tree | None:
    """The part of a tree in a folder of it; None if there is none."""
    if folder not in tree:
        return None
    start = folder + "/"
    return {name[len(start) :]: data for name, data in tree.items() if name.startswith(start)}
