"""YAML into frozen dataclasses, and nothing but what they declare.

The dataclass is the schema: its fields are the allowed keys, those without a default are required,
their types say what a value may be. Every error names file, line and field. Nothing is
constructed from YAML tags.
"""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from datetime import date
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

T = TypeVar("T")
_NULL_TAG = "tag:yaml.org,2002:null"
_STRING_TAGS = ("tag:yaml.org,2002:str", "tag:yaml.org,2002:timestamp")


class TableError(Exception):
    """A table cannot be used; the message names file, line, field and what is wrong."""


@dataclass(frozen=True, slots=True)
class Document:
    """One parsed YAML file, with the place of everything in it."""

    path: Path
    root: yaml.MappingNode

    @classmethod
    def open(cls, path: Path) -> Document:
        """Parse a file whose top level is a mapping.

        Raises:
            TableError: missing, unreadable, not YAML or not a mapping.
        """
        # libyaml's parser takes a tenth of the time; PyYAML may be built without it.
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        try:
            root = yaml.compose(path.read_bytes(), Loader=loader)
        except OSError as error:
            raise TableError(f"{path}: {error.strerror}") from error
        except yaml.MarkedYAMLError as error:
            line = error.problem_mark.line + 1 if error.problem_mark else 1
            raise TableError(f"{path}:{line}: {error.problem}") from error
        except yaml.YAMLError as error:
            raise TableError(f"{path}: {error}") from error
        if not isinstance(root, yaml.MappingNode):
            raise TableError(f"{path}:1: the top level is not a mapping")
        return cls(path, root)

    def check_schema(self, known: int) -> None:
        """Refuse a newer format before its unknown keys are complained about.

        Raises:
            TableError: no ``schema``, or another one than `known`.
        """
        node = next((value for key, value in self.root.value if key.value == "schema"), None)
        if node is None:
            self._fail(self.root, "", "schema is missing")
        found = _Reader(self.path).read(node, int, "schema")
        if found != known:
            advice = "update this package" if found > known else "this package is too new for it"
            self._fail(node, "schema", f"{found} is not the known schema {known}; {advice}")

    def read_as(self, kind: type[T]) -> T:
        """The whole file as a dataclass.

        Raises:
            TableError: something is missing, unknown, twice there or not what its type says.
        """
        result: T = _Reader(self.path).read(self.root, kind, "")
        return result

    def refuse_doubles(self, key: str, names: Sequence[str]) -> None:
        """Entries of the list `key` must differ in these names.

        Raises:
            TableError: the second of two equal ones, with its line.
        """
        for index, name in enumerate(names):
            if name in names[:index]:
                self.refuse(f"{name} is there twice", key, index)

    def refuse(self, message: str, key: str, index: int) -> NoReturn:
        """Complain about the entry `index` of the list `key`.

        Raises:
            TableError: always.
        """
        entries = next(value for name, value in self.root.value if name.value == key)
        self._fail(entries.value[index], f"{key}[{index}]", message)

    def _fail(self, node: yaml.Node, field: str, message: str) -> NoReturn:
        _Reader(self.path).fail(node, field, message)


class _Reader:
    """Turns nodes into values of a type; `field` is the way there, for messages."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def fail(self, node: yaml.Node, field: str, message: str) -> NoReturn:
        where = f"{self.path}:{node.start_mark.line + 1}: "
        raise TableError(where + (f"{field}: " if field else "") + message)

    def read(self, node: yaml.Node, kind: Any, field: str) -> Any:
        origin = get_origin(kind)
        if origin is Annotated:
            return self._matching(node, kind, field)
        if origin in (Union, types.UnionType):  # only `X | None` is used
            return None if node.tag == _NULL_TAG else self.read(node, get_args(kind)[0], field)
        if origin is tuple:
            items = self._items(node, field)
            return tuple(
                self.read(item, get_args(kind)[0], f"{field}[{at}]")
                for at, item in enumerate(items)
            )
        if origin is Mapping:
            return {
                name: self.read(value, get_args(kind)[1], _below(field, name))
                for name, (_, value) in self._pairs(node, field).items()
            }
        if is_dataclass(kind):
            return self._record(node, kind, field)
        return self._scalar(node, kind, field)

    def _record(self, node: yaml.Node, kind: Any, field: str) -> Any:
        known, required = _schema(kind)
        pairs = self._pairs(node, field)
        for name, (key, _) in pairs.items():
            if name not in known:
                self.fail(key, _below(field, name), "unknown key")
        for name in required:
            if name not in pairs:
                self.fail(node, field, f"{name} is missing")
        return kind(
            **{
                name: self.read(value, known[name], _below(field, name))
                for name, (_, value) in pairs.items()
            }
        )

    def _pairs(self, node: yaml.Node, field: str) -> dict[str, tuple[yaml.Node, yaml.Node]]:
        if not isinstance(node, yaml.MappingNode):
            self.fail(node, field, "is not a mapping")
        pairs: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                self.fail(key, field, "a key is not a name")
            if key.value in pairs:
                self.fail(key, _below(field, key.value), "is there twice")
            pairs[key.value] = (key, value)
        return pairs

    def _items(self, node: yaml.Node, field: str) -> list[yaml.Node]:
        if not isinstance(node, yaml.SequenceNode):
            self.fail(node, field, "is not a list")
        items: list[yaml.Node] = node.value
        return items

    def _matching(self, node: yaml.Node, kind: Any, field: str) -> str:
        plain, pattern = get_args(kind)
        text: str = self.read(node, plain, field)
        if not pattern.fullmatch(text):
            self.fail(node, field, f"{text!r} does not look like {pattern.pattern}")
        return text

    def _scalar(self, node: yaml.Node, kind: Any, field: str) -> Any:
        if not isinstance(node, yaml.ScalarNode):
            self.fail(node, field, "is not a single value")
        text: str = node.value
        if kind is int:
            if not re.fullmatch(r"\d+", text):
                self.fail(node, field, f"{text!r} is not a whole number")
            return int(text)
        if node.tag not in _STRING_TAGS:
            self.fail(node, field, f"{text or 'nothing'} is not text; quote it")
        if kind is date:
            return self._convert(node, date.fromisoformat, "a date (YYYY-MM-DD)", field)
        if issubclass(kind, Enum):
            choices = " or ".join(member.value for member in kind)
            return self._convert(node, kind, choices, field)
        return text

    def _convert(self, node: yaml.ScalarNode, make: Any, wanted: str, field: str) -> Any:
        try:
            return make(node.value)
        except ValueError:
            self.fail(node, field, f"{node.value!r} is not {wanted}")


def _below(field: str, name: str) -> str:
    return f"{field}.{name}" if field else name


@functools.cache
def _schema(kind: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Field -> type, and the fields without a default."""
    hints = get_type_hints(kind, include_extras=True)
    known = [f for f in fields(kind) if f.init]
    required = (f.name for f in known if f.default is MISSING and f.default_factory is MISSING)
    return {f.name: hints[f.name] for f in known}, tuple(required)
