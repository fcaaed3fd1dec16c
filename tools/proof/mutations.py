"""Makes mutants of Python source text: one small wrong change each.

It depends on neither this package nor vLLM. The changes: every condition is made always false and
always true, every comparison is shifted or reversed, statements that need no replacement are
removed, `max` and `min` are swapped, whole numbers get one more, and `continue` becomes `break`.

Why not a library: mutmut 3.8 refuses a package below a folder other than ``src``. cosmic-ray 8.7
imports vLLM anew for each mutant, mutates annotations, and cannot remove a statement, swap `max`
and `min`, or change only the lines that a series adds to vLLM's file.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Container, Iterator
from dataclasses import dataclass

_COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}


@dataclass(frozen=True, slots=True)
class Mutant:
    """A changed source text.

    Attributes:
        name: function, change and line of code; edits elsewhere in the file do not change it.
        source: the whole text.
    """

    name: str
    source: str


def mutants(source: str, lines: Container[int] | None = None) -> Iterator[Mutant]:
    """Yield all mutants of the functions and methods of a module, or only of `lines` of it."""
    tree = ast.parse(source)
    code = ["", *map(str.strip, source.splitlines())]
    for function in _functions(tree):
        for node in ast.walk(function):
            for label, about, replacement in _changes(node):
                line = getattr(about, "lineno", 0)
                if lines is not None and line not in lines:
                    continue
                changed = _replace(source, node, replacement)
                name = f"{function.name} {label}: {ast.unparse(about)[:70]}"
                yield Mutant(f"{name} in: {code[line]}", changed)


def _functions(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    """Functions and methods; what is nested in one belongs to it."""
    for node in tree.body:
        for inner in node.body if isinstance(node, ast.ClassDef) else [node]:
            if isinstance(inner, ast.FunctionDef):
                yield inner


def _changes(node: ast.AST) -> Iterator[tuple[str, ast.AST, str]]:
    """What can be done to a node: in words, to what, and the new text of the node."""
    for guard in _guards(node):
        yield "never", guard, _with_guard(node, guard, "False")
        yield "always", guard, _with_guard(node, guard, "True")
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        left, right = ast.unparse(node.left), ast.unparse(node.comparators[0])
        yield "compared otherwise", node, f"{left} {_COMPARISONS[type(node.ops[0])]} {right}"
    if _may_go(node):
        yield "removed", node, "pass"
    if isinstance(node, ast.Continue):
        yield "stops instead", node, "break"
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("max", "min"):
        other = "min" if ast.unparse(node.func) == "max" else "max"
        yield "swapped", node, f"{other}({', '.join(map(ast.unparse, node.args))})"
    if isinstance(node, ast.Constant) and type(node.value) is int:
        yield "one more", node, f"{node.value + 1}"


def _guards(node: ast.AST) -> Iterator[ast.expr]:
    if isinstance(node, ast.If | ast.IfExp):
        yield node.test
    elif isinstance(node, ast.BoolOp):
        yield from node.values


def _with_guard(node: ast.AST, guard: ast.expr, value: str) -> str:
    """The text of `node` with one of its conditions replaced."""
    constant = ast.parse(value, mode="eval").body

    class Swap(ast.NodeTransformer):
        def visit(self, inner: ast.AST) -> ast.AST:
            return constant if inner is guard else self.generic_visit(inner)

    # Copied together, so that the guard is found again in the copy.
    both = copy.deepcopy((node, guard))
    guard = both[1]
    return ast.unparse(Swap().visit(both[0]))


def _may_go(node: ast.AST) -> bool:
    if isinstance(node, ast.Expr):
        return not isinstance(node.value, ast.Constant)  # a docstring
    if isinstance(node, ast.Assign):
        return not isinstance(node.targets[0], ast.Name)  # a name that is read later
    return isinstance(node, ast.AugAssign | ast.Raise | ast.Delete)


def _replace(source: str, node: ast.AST, replacement: str) -> str:
    """`source` with the lines of `node` replaced; further lines are indented like its first."""
    assert isinstance(node, ast.stmt | ast.expr)
    lines = source.splitlines(keepends=True)
    first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
    # Columns count bytes.
    head = lines[first].encode()[: node.col_offset].decode()
    tail = lines[last].encode()[node.end_col_offset or 0 :].decode()
    inside = replacement.replace("\n", "\n" + " " * node.col_offset)
    if isinstance(node, ast.expr):
        inside = "(" + inside + ")"
    return "".join([*lines[:first], head + inside + tail, *lines[last + 1 :]])
