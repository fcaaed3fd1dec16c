"""Fingerprints methods by their source text.

Equal fingerprints mean the same method. A fingerprint ignores comments, docstrings, line wraps and
indentation width, and is the same on every Python; any other difference changes it. `ast.dump` and
bytecode differ between Pythons, so it is a hash over tokens.

This module must not depend on vLLM, versions or patching.
"""

from __future__ import annotations

import ast
import hashlib
import io
import re
import tokenize
from collections.abc import Iterable, Iterator

_LENGTH = 16
_BLOCK = ("if", "1", ":", "NEWLINE", "INDENT")
_LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.ENCODING, tokenize.ENDMARKER}
# Python 3.12 splits an f-string into parts; before that it was one STRING token.
_FSTRING_START = getattr(tokenize, "FSTRING_START", -1)
_FSTRING_END = getattr(tokenize, "FSTRING_END", -1)


def fingerprints(source: str, names: Iterable[str]) -> dict[str, str]:
    """Fingerprint the named methods of a module's source.

    Args:
        source: text of one Python module.
        names: methods as ``"Class.method"``.

    Returns:
        name -> 16 hex digits; a method that the source does not define is left out.

    Raises:
        SyntaxError: the source does not parse.
    """
    found = {f"{c.name}.{m.name}": m for c in _classes(source) for m in _methods(c)}
    # Python reads every line end as \n, inside of strings too.
    lines = [f"{line}\n" for line in re.split(r"\r\n?|\n", source)]
    return {name: _hash(lines, found[name]) for name in names if name in found}


def method_names(source: str, class_name: str) -> frozenset[str]:
    """Names of the methods that a class in this source defines itself."""
    return frozenset(
        method.name for c in _classes(source) if c.name == class_name for method in _methods(c)
    )


def call_basis(sources: Iterable[str], method: str) -> str:
    """Fingerprint the arguments of every call of a method.

    It covers the text of each call ``x.method(...)`` and of each statement in the same function
    that assigns a name which the call depends on.

    Args:
        sources: texts of Python modules.
        method: name of the method that is called.

    Raises:
        SyntaxError: a source does not parse.
    """
    words: list[str] = []
    for source in sources:
        functions = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef)]
        for function in functions:
            for node in _sliced(function, method):
                text = ast.get_source_segment(source, node) or ""
                words += ["CALL", *(word for _, word in _words(f"({text})"))]
    return hashlib.sha256("\x00".join(words).encode()).hexdigest()[:_LENGTH]


def _sliced(function: ast.FunctionDef, method: str) -> list[ast.AST]:
    """Calls of the method and the assigned expressions they depend on, in the order of the text."""
    nodes = list(ast.walk(function))
    kept: list[ast.AST] = [
        n
        for n in nodes
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.func.attr == method
    ]
    reached: set[str] = set()
    pending = list(kept)
    while pending:
        names = {n.id for n in ast.walk(pending.pop()) if isinstance(n, ast.Name)} - reached
        reached |= names
        for node in nodes:
            if not isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)):
                continue
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            assigned = {n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)}
            if node.value is not None and assigned & names and node not in kept:
                kept.append(node)
                pending.append(node)
    return sorted(kept, key=lambda n: (n.lineno, n.col_offset))  # type: ignore[attr-defined]


def _classes(source: str) -> Iterator[ast.ClassDef]:
    return (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef))


def _methods(node: ast.ClassDef) -> Iterator[ast.FunctionDef]:
    return (item for item in node.body if isinstance(item, ast.FunctionDef))


def _hash(lines: list[str], method: ast.FunctionDef) -> str:
    first = min([method.lineno, *(d.lineno for d in method.decorator_list)])
    # A block of its own: Python then takes the method with whatever indentation it has.
    text = "if 1:\n" + "".join(lines[first - 1 : method.end_lineno])
    docstring = _docstring_lines(method, first - 1)
    # The indent that stands before a docstring is that of the whole body.
    words = [word for row, word in _words(text) if row not in docstring or word == "INDENT"]
    words = words[len(_BLOCK) : -1]  # without the block's own tokens
    return hashlib.sha256("\x00".join(words).encode()).hexdigest()[:_LENGTH]


def _docstring_lines(method: ast.FunctionDef, first: int) -> range:
    """Rows of the docstring in a text whose first row is row `first` of the source."""
    if ast.get_docstring(method, clean=False) is None:
        return range(0)
    node = method.body[0]
    return range(node.lineno - first + 1, (node.end_lineno or node.lineno) - first + 2)


def _words(text: str) -> Iterator[tuple[int, str]]:
    """Tokens as (row, word); layout dropped, an f-string kept whole as it is written."""
    lines = text.splitlines(keepends=True)
    depth, start = 0, (0, 0)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == _FSTRING_START:
            start = start if depth else token.start
            depth += 1
        elif token.type == _FSTRING_END:
            depth -= 1
            if not depth:
                yield start[0], _between(lines, start, token.end)
        elif depth or token.type in _LAYOUT:
            continue
        elif token.type in (tokenize.INDENT, tokenize.DEDENT, tokenize.NEWLINE):
            yield token.start[0], tokenize.tok_name[token.type]
        else:
            yield token.start[0], token.string


def _between(lines: list[str], start: tuple[int, int], end: tuple[int, int]) -> str:
    (first, left), (last, right) = start, end
    if first == last:
        return lines[first - 1][left:right]
    middle = lines[first : last - 1]
    return "".join([lines[first - 1][left:], *middle, lines[last - 1][:right]])
