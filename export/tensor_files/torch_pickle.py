"""The pickles of torch, read as data: a list of instructions is followed here that can build plain
values and nothing else. No name in it is ever looked up in Python, so nothing in it can be run.

Whoever reads says which names are allowed and what their calls make, by default a `Made`.
"""

from __future__ import annotations

import pickletools
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

MAX_OPCODES = 1 << 21  # an index has some fifty for each piece of a tensor; read in seconds
MAX_DEPTH = 64
CONSTANT = re.compile(
    r"torch\.(bfloat16|float\w+|q?u?int\d+|bool|complex\d+|strided|sparse_coo|contiguous_format"
    r"|preserve_format|channels_last)"
)
_VALUES = (
    *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
    *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
)


@dataclass(frozen=True)
class Name:
    """A name of Python's, by its module. It stands for itself."""

    text: str


@dataclass(eq=False)
class Made:
    """What a call would have made: who was called, with what, and what was set afterwards."""

    name: str
    arguments: tuple[Any, ...]
    state: Any = None


class _Reader:
    """A stack, what was remembered, and what each instruction does with them."""

    def __init__(
        self,
        names: Collection[str],
        makers: Mapping[str, Callable[..., Any]],
        stored: Callable[[Any], Any],
    ) -> None:
        self._names, self._makers = names, makers
        self.stack: list[Any] = []
        self._marks: list[int] = []  # heights of the stack
        memo: dict[int, Any] = {}
        stack, push, pop = self.stack, self.stack.append, self._pop
        self.steps: dict[str, Callable[[Any], object]] = {
            **dict.fromkeys(_VALUES, push),
            **dict.fromkeys(("PROTO", "FRAME", "STOP"), lambda _: None),
            "NONE": lambda _: push(None),
            "NEWTRUE": lambda _: push(True),
            "NEWFALSE": lambda _: push(False),
            "EMPTY_DICT": lambda _: push({}),
            "EMPTY_LIST": lambda _: push([]),
            "EMPTY_TUPLE": lambda _: push(()),
            "TUPLE1": lambda _: push(tuple(pop(1))),
            "TUPLE2": lambda _: push(tuple(pop(2))),
            "TUPLE3": lambda _: push(tuple(pop(3))),
            "TUPLE": lambda _: push(tuple(self._above_mark())),
            "MARK": lambda _: self._marks.append(len(stack)),
            "BINPUT": lambda at: memo.__setitem__(at, stack[-1]),
            "LONG_BINPUT": lambda at: memo.__setitem__(at, stack[-1]),
            "MEMOIZE": lambda _: memo.__setitem__(len(memo), stack[-1]),
            "BINGET": lambda at: push(memo[at]),
            "LONG_BINGET": lambda at: push(memo[at]),
            "GLOBAL": lambda text: push(self._name(text.replace(" ", ".", 1))),
            "STACK_GLOBAL": lambda _: push(self._name(".".join(pop(2)))),
            "REDUCE": lambda _: push(self._made(*pop(2))),
            "NEWOBJ": lambda _: push(self._made(*pop(2))),
            "BINPERSID": lambda _: push(stored(stack.pop())),
            "BUILD": lambda _: self._set_state(stack.pop()),
            "APPEND": lambda _: self._append(pop(1)),
            "APPENDS": lambda _: self._append(self._above_mark()),
            "SETITEM": lambda _: self._set_items(pop(2)),
            "SETITEMS": lambda _: self._set_items(self._above_mark()),
        }

    def _pop(self, count: int) -> list[Any]:
        if len(self.stack) < count:
            raise IndexError
        values = self.stack[-count:]
        del self.stack[-count:]
        return values

    def _above_mark(self) -> list[Any]:
        mark = self._marks.pop()
        values = self.stack[mark:]
        del self.stack[mark:]
        return values

    def _name(self, text: str) -> Name:
        if text not in self._names and not CONSTANT.fullmatch(text):
            raise ValueError(f"it names {ascii(text[:80])[1:-1]}, which no checkpoint needs")
        return Name(text)

    def _made(self, name: Any, arguments: Any) -> Any:
        text, given = _of_type(name, Name).text, _of_type(arguments, tuple)
        maker = self._makers.get(text)
        return Made(text, given) if maker is None else maker(*given)

    def _set_state(self, state: Any) -> None:
        if isinstance(self.stack[-1], Made):  # an attribute of a dict says nothing of a model
            self.stack[-1].state = state

    def _append(self, values: list[Any]) -> None:
        _of_type(self.stack[-1], list).extend(values)

    def _set_items(self, values: list[Any]) -> None:
        target = _of_type(self.stack[-1], dict)
        for key, value in zip(values[::2], values[1::2], strict=True):
            target[_key(key)] = value


def _no_storage(described: Any) -> Any:
    raise ValueError("it holds values, where none can be")


def read_pickle(
    data: bytes,
    names: Collection[str],
    makers: Mapping[str, Callable[..., Any]],
    stored: Callable[[Any], Any] = _no_storage,
) -> Any:
    """The value that a pickle describes. Raises ValueError.

    names: those that may stand in it beside torch's constants; makers: name -> what a call of it
    makes, out of values that may be anything; stored: makes a storage of torch out of the tuple
    that describes one.
    """
    reader, count = _Reader(names, makers, stored), 0
    try:
        for opcode, argument, _ in pickletools.genops(data):
            count += 1
            if count > MAX_OPCODES:
                raise ValueError(f"it has more than {MAX_OPCODES} instructions")
            step = reader.steps.get(opcode.name)
            if step is None:
                raise ValueError(
                    f"it has the instruction {opcode.name}, which torch.save never writes"
                )
            step(argument)
        (value,) = reader.stack
    except (IndexError, KeyError, TypeError) as error:
        raise ValueError(f"its instruction {count} has nothing to work on") from error
    _check_size(value, max(2 * count, min(64 * count, MAX_OPCODES)))
    return value


def _check_size(value: Any, most: int) -> None:
    """Refuse values that hold themselves, or each other so often that going through them never ends."""
    left, seen = [(value, 0)], 0
    while left:
        each, depth = left.pop()
        if isinstance(each, Made):
            inner = [*each.arguments, each.state]
        elif isinstance(each, dict):
            inner = [*each.values(), *(key for key in each if isinstance(key, Made))]
        elif isinstance(each, list | tuple):
            inner = list(each)
        else:
            continue
        seen += 1 + len(inner)
        if seen > most or depth > MAX_DEPTH:
            raise ValueError("its values are nested without end")
        left += [(one, depth + 1) for one in inner]


def _key(value: Any) -> Any:
    """A key of a dict; tuples of tuples of the same tuple would take for ever to compare."""
    for each in value if isinstance(value, tuple) else (value,):
        _of_type(each, str | int | float | None | Name | Made)
    return value


def _of_type(value: Any, type: Any) -> Any:
    if not isinstance(value, type):
        raise TypeError
    return value
