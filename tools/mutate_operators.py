"""Small mistakes that one could make in a module, one at a time, as changes of its syntax tree.

What only people read is left alone: docstrings, annotations (but for the bounds in them) and the
texts of errors.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from typing import NamedTuple

Change = Callable[[], Callable[[], None]]  # makes it; returns what takes it back

COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitAnd,
    ast.Pow: ast.Mult,
}
TEXTS = (ast.JoinedStr, ast.Raise)
# What these are given as words of three letters or more says in a message what is read.
NAMING_CALLS = {"read_plain", "open_plain", "unreadable", "not_plain", "count", "name", "number"}
NAMING_CALLS |= {"numbers", "string", "reach", "take", "pass_strings"}
SIMPLE_TESTS = (ast.Name, ast.Attribute, ast.Call, ast.NamedExpr, ast.Subscript)


class Mutant(NamedTuple):
    """One change."""

    line: int
    column: int
    change: str
    apply: Change


def mutants(tree: ast.Module) -> list[Mutant]:
    """Every change of a module, in the order of its text. `apply` changes the tree itself."""
    return sorted(_Finder().of(tree), key=lambda m: (m.line, m.column, m.change))


def _replacing(node: ast.AST, field: str, value: object, at: int | None = None) -> Change:
    def apply() -> Callable[[], None]:
        if at is None:
            old = getattr(node, field)
            setattr(node, field, value)
            return lambda: setattr(node, field, old)
        kept = getattr(node, field)
        setattr(node, field, [*kept[:at], value, *kept[at + 1 :]])
        return lambda: setattr(node, field, kept)

    return apply


class _Finder:
    def of(self, tree: ast.Module) -> Iterator[Mutant]:
        yield from self._visit(tree, inside=False)

    def _visit(self, node: ast.AST, inside: bool) -> Iterator[Mutant]:
        """Changes of a node's children; `inside` a function."""
        inside = inside or isinstance(node, ast.FunctionDef | ast.Lambda)
        for field, value in ast.iter_fields(node):
            if field in ("decorator_list", "type_comment"):
                continue
            if field in ("annotation", "returns"):
                yield from _bounds(node, field, value)
                continue
            items = value if isinstance(value, list) else [value]
            for at, child in enumerate(items):
                if isinstance(child, ast.AST):
                    where = at if isinstance(value, list) else None
                    yield from self._child(node, field, where, child, inside)

    def _child(
        self, parent: ast.AST, field: str, at: int | None, child: ast.AST, inside: bool
    ) -> Iterator[Mutant]:
        for change, new in _changes(child, parent, field, inside):
            if isinstance(new, ast.AST) and isinstance(child, ast.expr | ast.stmt):
                ast.copy_location(new, child)
                ast.fix_missing_locations(new)
            line, column = _place(child, parent)
            yield Mutant(line, column, change, _replacing(parent, field, new, at))
        if isinstance(child, TEXTS) or _is_text(child) or _is_types(child, parent, inside):
            return
        yield from self._visit(child, inside)


def _place(child: ast.AST, parent: ast.AST) -> tuple[int, int]:
    node = child if hasattr(child, "lineno") else parent
    return getattr(node, "lineno", 0), getattr(node, "col_offset", 0)


def _is_text(node: ast.AST) -> bool:
    """A docstring."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_types(node: ast.AST, parent: ast.AST, inside: bool) -> bool:
    """A union or a Literal outside of functions: the name of a type, most of the time."""
    if inside:
        return False
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return True
    return (
        isinstance(node, ast.Subscript)
        and isinstance(node.value, ast.Name)
        and node.value.id in ("Literal", "TypeVar", "Callable")
    )


def _bounds(node: ast.AST, field: str, annotation: ast.AST | None) -> Iterator[Mutant]:
    """Changes of the numbers in msgspec.Meta(...)."""
    for call in ast.walk(annotation) if annotation is not None else ():
        if isinstance(call, ast.Call):
            for keyword in call.keywords:
                yield from _Finder()._child(keyword, "value", None, keyword.value, False)


def _changes(
    node: ast.AST, parent: ast.AST, field: str, inside: bool
) -> Iterator[tuple[str, ast.AST | None]]:
    """What may stand in the place of a node."""
    yield from _of_expression(node, parent, field, inside)
    yield from _of_statement(node)
    if field in ("test", "ifs") and isinstance(node, SIMPLE_TESTS):
        yield "condition negated", ast.UnaryOp(ast.Not(), copy.copy(node))


def _of_expression(
    node: ast.AST, parent: ast.AST, field: str, inside: bool
) -> Iterator[tuple[str, ast.AST | None]]:
    if isinstance(node, ast.Compare):
        for at, op in enumerate(node.ops):
            for other in COMPARISONS[type(op)]:
                new = copy.copy(node)
                new.ops = [*node.ops[:at], other(), *node.ops[at + 1 :]]
                yield f"{type(op).__name__} -> {other.__name__}", new
    elif isinstance(node, ast.BinOp) and not _joins_text(node):
        if inside or not isinstance(node.op, ast.BitOr):
            op_type = ARITHMETIC.get(type(node.op))
            if op_type is not None:
                yield (
                    f"{type(node.op).__name__} -> {op_type.__name__}",
                    ast.BinOp(node.left, op_type(), node.right),
                )
    elif isinstance(node, ast.BoolOp):
        swapped = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield f"-> {type(swapped).__name__}", ast.BoolOp(swapped, node.values)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield f"{type(node.op).__name__} dropped", node.operand
    elif isinstance(node, ast.Constant):
        yield from _of_constant(node, parent, field)


def _joins_text(node: ast.BinOp) -> bool:
    sides = (node.left, node.right)
    return any(
        isinstance(s, ast.JoinedStr) or (isinstance(s, ast.Constant) and isinstance(s.value, str))
        for s in sides
    )


def _of_constant(
    node: ast.Constant, parent: ast.AST, field: str
) -> Iterator[tuple[str, ast.AST | None]]:
    value = node.value
    if isinstance(parent, ast.Expr) or value is None or value is ...:
        return
    if isinstance(value, bool):
        yield f"{value} -> {not value}", ast.Constant(not value)
    elif isinstance(value, int | float):
        yield f"{value} -> {value + 1}", ast.Constant(value + 1)
    elif isinstance(value, str | bytes) and not _for_people(value, parent):
        longer = value + "#" if isinstance(value, str) else value + b"#"
        yield f"{value!r} changed", ast.Constant(longer)


def _for_people(value: str | bytes, parent: ast.AST) -> bool:
    """Whether a text is most likely part of a message."""
    if isinstance(parent, ast.Call) and len(value) > 2:
        name = getattr(parent.func, "attr", getattr(parent.func, "id", ""))
        if name in NAMING_CALLS:
            return True
    return (isinstance(value, str) and " " in value) or isinstance(
        parent, ast.Yield | ast.Return | ast.JoinedStr | ast.FormattedValue
    )


def _of_statement(node: ast.AST) -> Iterator[tuple[str, ast.AST | None]]:
    nothing = ast.Pass()
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield "call dropped", nothing
    elif isinstance(node, ast.Raise):
        yield "raise dropped", nothing
    elif isinstance(node, ast.AugAssign):
        yield "assignment dropped", nothing
    elif isinstance(node, ast.Return) and node.value is not None and not _is_none(node.value):
        yield "returns None", ast.Return(ast.Constant(None))
    elif isinstance(node, ast.Break):
        yield "break -> continue", ast.Continue()
    elif isinstance(node, ast.Continue):
        yield "continue -> break", ast.Break()
    elif isinstance(node, ast.ExceptHandler):
        yield from _of_handler(node)


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _of_handler(node: ast.ExceptHandler) -> Iterator[tuple[str, ast.AST | None]]:
    types = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
    for dropped in types:
        if dropped is not None:
            new = copy.copy(node)
            new.type = ast.Tuple([t for t in types if t is not dropped and t], ast.Load())
            ast.copy_location(new.type, dropped)
            yield f"{ast.unparse(dropped)} not caught", new
