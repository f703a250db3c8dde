"""Reader of torch's pickles as data: only instructions that build plain values are followed.

No name in a pickle is ever looked up in Python, so nothing in it can be run. The caller says which
names are allowed and what their calls make, by default a `Made`.
"""

from __future__ import annotations

import pickletools
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

# An index has about fifty for each piece of a tensor; limited so that reading ends within seconds.
MAX_OPCODES = 1 << 21
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
    """Dotted name of a Python object, kept as text."""

    text: str


@dataclass(eq=False)
class Made:
    """Call that was not run: its name and arguments, and the state that was set on its result."""

    name: str
    arguments: tuple[Any, ...]
    state: Any = None


class _Reader:
    """Machine of a pickle: the stack, the memo, and a function for each instruction."""

    def __init__(
        self,
        names: Collection[str],
        makers: Mapping[str, Callable[..., Any]],
        stored: Callable[[Any], Any],
    ) -> None:
        self._names, self._makers, self._stored = names, makers, stored
        self.stack: list[Any] = []
        self._marks: list[int] = []  # heights of the stack
        self._memo: dict[int, Any] = {}
        self.steps = self._steps()

    def _steps(self) -> dict[str, Callable[[Any], object]]:
        memo, stack, push, pop = self._memo, self.stack, self.stack.append, self._pop
        return {
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
            "BINPERSID": lambda _: push(self._stored(stack.pop())),
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
            raise ValueError(f"it names {ascii(text[:80])[1:-1]}, which is not needed for tensors")
        return Name(text)

    def _made(self, name: Any, arguments: Any) -> Any:
        text, given = _of_type(name, Name).text, _of_type(arguments, tuple)
        maker = self._makers.get(text)
        return Made(text, given) if maker is None else maker(*given)

    def _set_state(self, state: Any) -> None:
        if isinstance(self.stack[-1], Made):  # not on a dict: no reader needs its attributes
            self.stack[-1].state = state

    def _append(self, values: list[Any]) -> None:
        _of_type(self.stack[-1], list).extend(values)

    def _set_items(self, values: list[Any]) -> None:
        target = _of_type(self.stack[-1], dict)
        for key, value in zip(values[::2], values[1::2], strict=True):
            target[_key(key)] = value


def _no_storage(described: Any) -> Any:
    raise ValueError("it refers to values, but has none")


def read_pickle(
    data: bytes,
    names: Collection[str],
    makers: Mapping[str, Callable[..., Any]],
    stored: Callable[[Any], Any] = _no_storage,
) -> Any:
    """Return the value that a pickle describes. Raises ValueError.

    names: names that it may have beside torch's constants; makers: name -> function that makes what
    a call of it would, from arguments that may be anything; stored: makes a storage of torch from
    the tuple that describes it.
    """
    reader, count = _Reader(names, makers, stored), 0
    try:
        for opcode, argument, _ in pickletools.genops(data):
            count += 1
            if count > MAX_OPCODES:
                raise ValueError(f"it has more than {MAX_OPCODES} instructions")
            step = reader.steps.get(opcode.name)
            if step is None:
                raise ValueError(f"its instruction {opcode.name} is not one that torch.save writes")
            step(argument)
        (value,) = reader.stack
    except (IndexError, KeyError, TypeError) as error:
        raise ValueError(f"its instruction {count} has no valid operands") from error
    _check_size(value, max(2 * count, min(64 * count, MAX_OPCODES)))
    return value


def _check_size(value: Any, most: int) -> None:
    """Refuse values that hold themselves, or each other so often that visiting them never ends."""
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
        left += [(value, depth + 1) for value in inner]


def _key(value: Any) -> Any:
    """Check a key of a dict. No nested tuples, because hashing those that share parts never ends."""
    for each in value if isinstance(value, tuple) else (value,):
        _of_type(each, str | int | float | None | Name | Made)
    return value


def _of_type(value: Any, type: Any) -> Any:
    if not isinstance(value, type):
        raise TypeError
    return value
