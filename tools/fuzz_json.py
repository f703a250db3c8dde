"""JSON that is changed where it has meaning: as a tree, not as text.

Objects are lists of pairs, so that a name can come twice, and numbers may be texts that no Python
number prints as.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any, TypeAlias

Tree: TypeAlias = Any  # Pairs, list, str, bool, None, or a Literal


class Pairs(list[tuple[str, Tree]]):
    """An object."""


class Literal(str):
    """A value as it stands in the text."""


NUMBERS = (
    "0", "-0", "1", "-1", "2", "3", "7", "8", "15", "16", "31", "32", "33", "63", "64", "127",
    "128", "255", "256", "1000", "4095", "4096", "4097", "65535", "65536", "16777215", "16777216",
    "16777217", "2147483647", "2147483648", "4294967295", "4294967296", "9223372036854775807",
    "9223372036854775808", "18446744073709551615", "18446744073709551616", "-9223372036854775808",
    "0.0", "0.5", "1.0", "3.0", "1e3", "1e-9", "1e15", "1e308", "1e400", "-1e400", "5e-324",
    "NaN", "Infinity", "-Infinity", "1e", "01", "0x10", "1_000", "+1", "1.",
    "9" * 400, "1" + "0" * 5000,
)  # fmt: skip
TEXTS = (
    "", " ", "a", "0", "../x", "/etc/passwd", "C:\\x", "a/b", "a//b", "./a", "a/.", "con", "a\\b",
    "\0", "\n", "\r\n", "\x1b[31m", "\u202e", "\ud800", "\ufeff", "é", "e\u0301", "😀", "a" * 300,
    "f" * 64, "x" * 5000, "true", "null", "int4", "int8", "fp16", "fp32", "stem", "{{ x }}",
)  # fmt: skip
OTHERS = ("true", "false", "null", "[]", "{}", "[[]]", '""', "[1]", '{"a":1}', "nul", "")


def parse(text: str | bytes) -> Tree:
    """The tree of a text; raises ValueError or RecursionError."""
    return json.loads(
        text,
        object_pairs_hook=Pairs,
        parse_int=Literal,
        parse_float=Literal,
        parse_constant=Literal,
    )


def encode(tree: Tree) -> str:
    """Text of a tree."""
    if isinstance(tree, Literal):
        return str(tree)
    if isinstance(tree, Pairs):
        return "{" + ",".join(f"{json.dumps(k)}:{encode(v)}" for k, v in tree) + "}"
    if isinstance(tree, list):
        return "[" + ",".join(map(encode, tree)) + "]"
    return json.dumps(tree)


Place: TypeAlias = tuple[list[Any], int]  # a container and a position in it


def _places(tree: Tree) -> list[Place]:
    """Every value of a tree, as the place that it has in its container."""
    found: list[Place] = []
    stack = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, list):
            found += [(node, at) for at in range(len(node))]
            stack += [item[1] for item in node] if isinstance(node, Pairs) else node
    return found


def _value(place: Place) -> Tree:
    item = place[0][place[1]]
    return item[1] if isinstance(place[0], Pairs) else item


def _set(place: Place, value: Tree) -> None:
    node, at = place
    value = _fresh(value)  # a container inside of itself would have no text
    node[at] = (node[at][0], value) if isinstance(node, Pairs) else value


def _near(value: Tree, rng: Random) -> Tree:
    """A value of the same type, and often one that is valid, too."""
    if isinstance(value, Literal):
        try:
            number = int(value)
        except ValueError:
            return Literal(rng.choice(NUMBERS))
        return Literal(
            str(rng.choice([number + 1, number - 1, number * 2, number // 2, -number, number % 2]))
        )
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        at = rng.randrange(len(value) + 1)
        return rng.choice(
            [value + "x", value[:at], value[:at] + rng.choice(TEXTS) + value[at:], value.upper()]
        )
    if isinstance(value, list) and value:
        kept = type(value)(value)
        rng.shuffle(kept)
        return kept
    return _odd(rng)


def _odd(rng: Random) -> Tree:
    kind = rng.randrange(4)
    if kind == 0:
        return rng.choice(TEXTS)
    if kind == 1:
        return Literal(rng.choice(OTHERS))
    return Literal(rng.choice(NUMBERS))


def _change(tree: Tree, other: Tree, rng: Random) -> Tree:
    places = _places(tree)
    if not places:
        return _odd(rng)
    place = rng.choice(places)
    node, at = place
    steps: list[Callable[[], object]] = [
        lambda: _set(place, _near(_value(place), rng)),
        lambda: _set(place, _near(_value(place), rng)),
        lambda: _set(place, _odd(rng)),
        lambda: node.pop(at),
        lambda: node.insert(rng.randrange(len(node) + 1), _fresh_item(node[at])),
        lambda: _set(place, _value(rng.choice(places))),
        lambda: _swap(place, rng.choice(places)),
        lambda: _graft(place, _places(other), rng),
        lambda: _rename(place, places, rng),
        lambda: _set(place, _deep(_value(place), rng)),
        lambda: node.extend(_fresh_item(node[at]) for _ in range(rng.choice([2, 9, 40]))),
    ]
    rng.choice(steps)()
    return tree


def _swap(first: Place, second: Place) -> None:
    a, b = _value(first), _value(second)
    _set(first, b)
    _set(second, a)


def _graft(place: Place, others: list[Place], rng: Random) -> None:
    if others:
        _set(place, _value(rng.choice(others)))


def _rename(place: Place, places: list[Place], rng: Random) -> None:
    """Give a field the name of another field, or an odd one; or put it somewhere else."""
    node, at = place
    objects = [p for p in places if isinstance(p[0], Pairs)]
    if not isinstance(node, Pairs) or not objects:
        return
    holder, index = rng.choice(objects)
    if rng.randrange(2):
        node[at] = (rng.choice([holder[index][0], rng.choice(TEXTS)]), node[at][1])
    else:
        holder.append((node[at][0], _fresh(node[at][1])))


def _deep(value: Tree, rng: Random) -> Tree:
    depth = rng.choice([1, 2, 31, 32, 33, 100, 2000])
    start, end = rng.choice([("[", "]"), ('{"a":', "}")])
    inner = encode(value) if not isinstance(value, list) else "1"
    return Literal(start * depth + inner + end * depth)


def mutate_json(data: bytes, other: bytes, rng: Random) -> bytes:
    """A text with one to four changes; raises ValueError if it is none."""
    try:
        tree, donor = parse(data), parse(other)
        for _ in range(rng.choice([1, 1, 1, 2, 4])):
            tree = _change(tree, donor, rng)
        return encode(tree).encode()
    except RecursionError as error:
        raise ValueError("too deep") from error


def _fresh_item(item: Any) -> Any:
    return (item[0], _fresh(item[1])) if isinstance(item, tuple) else _fresh(item)


def _fresh(tree: Tree) -> Tree:
    if isinstance(tree, Pairs):
        return Pairs((name, _fresh(value)) for name, value in tree)
    if isinstance(tree, list):
        return [_fresh(value) for value in tree]
    return tree
