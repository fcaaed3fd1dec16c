"""Reads the Python values that vLLM prints: argument dictionaries, configurations, objects' reprs.

vLLM prints its arguments with ``%s``, so a value may be any object's repr:
``CompilationConfig(mode=<CompilationMode.NONE: 0>)``, ``PosixPath('/x')``. Such a value is kept as
its text. White space may be missing: a log that was hard-wrapped is read without any.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

_CLOSING = {"{": "}", "(": ")", "[": "]", "<": ">"}
_STRING = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"", re.DOTALL)
_REPR = re.compile(r"[A-Za-z_][\w.]*\((.*)\)", re.DOTALL)


class UnreadableError(ValueError):
    """Brackets or quotes that do not close, or a part that is no ``key: value``."""


def read_dictionary(text: str) -> dict[str, Any]:
    """The dictionary that `text` begins with; what follows its closing bracket is ignored.

    Raises:
        UnreadableError: it does not end, or is no dictionary.
    """
    if not text.startswith("{"):
        raise UnreadableError("no dictionary")
    inner = text[1 : _end(text, 0) - 1]
    return dict(_pair(part, ":") for part in _parts(inner) if part)


def read_fields(text: str) -> dict[str, Any]:
    """The ``name=value`` fields of a repr's inside or of vLLM's engine line.

    The last field counts only if a comma or the end of a repr follows it: a line may be cut.
    """
    fields: dict[str, Any] = {}
    for part in _parts(text, cut=True):
        try:
            name, value = _pair(part, "=", quoted=False)
        except UnreadableError:
            continue
        fields.setdefault(name, value)
    return fields


def read_value(text: str) -> Any:
    """A literal's value, a dictionary with its values read, or the text of anything else."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        pass
    if text.startswith("{"):
        try:
            return read_dictionary(text)
        except UnreadableError:
            return text
    return text


def read_object(value: Any) -> dict[str, Any]:
    """The fields of a dictionary or of an object's repr, such as ``SpeculativeConfig(...)``."""
    if isinstance(value, dict):
        return value
    if isinstance(value, str) and (found := _REPR.fullmatch(value)) is not None:
        return read_fields(found[1] + ",")
    return {}


def _pair(part: str, separator: str, *, quoted: bool = True) -> tuple[str, Any]:
    if quoted:
        key = _STRING.match(part)
        name, rest = (key[0][1:-1], part[key.end() :]) if key else ("", "")
    else:
        name, found, rest = part.partition(separator)
        rest = found + rest
    if not name or not rest.startswith(separator):
        raise UnreadableError(part)
    return name.strip(), read_value(rest[1:])


def _parts(text: str, *, cut: bool = False) -> Iterator[str]:
    """`text` split at its outermost commas; with `cut`, only parts that a comma ends."""
    start = at = 0
    while at < len(text):
        if text[at] == ",":
            yield text[start:at].strip()
            start = at = at + 1
            continue
        try:
            at = _end(text, at)
        except UnreadableError:
            if cut:
                return
            raise
    if not cut:
        yield text[start:].strip()


def _end(text: str, at: int) -> int:
    """Where the string, the bracket or the character that begins at `at` ends."""
    if text[at] in "'\"":
        if (string := _STRING.match(text, at)) is None:
            raise UnreadableError("a string that does not end")
        return string.end()
    if text[at] not in _CLOSING:
        return at + 1
    open_brackets = [_CLOSING[text[at]]]
    at += 1
    while open_brackets:
        if at >= len(text):
            raise UnreadableError("a bracket that does not close")
        if text[at] == open_brackets[-1]:
            open_brackets.pop()
            at += 1
        elif text[at] in _CLOSING:
            open_brackets.append(_CLOSING[text[at]])
            at += 1
        elif text[at] in "'\"":
            at = _end(text, at)
        else:
            at += 1
    return at
