"""Fingerprints of methods, taken from source text.

A fingerprint answers one question: is this method the one we know? It must survive what does not
change behaviour (comments, docstrings, line wraps, the Python that computes it) and nothing else.
`ast.dump` and bytecode both differ between Pythons, so the fingerprint is a hash over tokens.

Knows nothing of vLLM, versions or patching.
"""

from __future__ import annotations

import ast
import hashlib
import io
import re
import tokenize
from collections.abc import Iterable, Iterator

_LENGTH = 16
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


def _classes(source: str) -> Iterator[ast.ClassDef]:
    return (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef))


def _methods(node: ast.ClassDef) -> Iterator[ast.FunctionDef]:
    return (item for item in node.body if isinstance(item, ast.FunctionDef))


def _hash(lines: list[str], method: ast.FunctionDef) -> str:
    first = min([method.lineno, *(d.lineno for d in method.decorator_list)])
    text = "".join(lines[first - 1 : method.end_lineno])
    # Tokens are compared as they would stand at the top of a module.
    indent = len(text) - len(text.lstrip(" "))
    body = "".join(line[indent:] if line.strip() else line for line in text.splitlines(True))
    docstring = _docstring_lines(method, first)
    # The indent that stands before a docstring is that of the whole body.
    words = [word for row, word in _words(body) if row not in docstring or word == "INDENT"]
    return hashlib.sha256("\x00".join(words).encode()).hexdigest()[:_LENGTH]


def _docstring_lines(method: ast.FunctionDef, first: int) -> range:
    """Rows of the docstring, counted from 1 within the method's own text."""
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
