"""Writes compat_matrix.schema.json from the dataclasses: ``python -m tools.table.schema``."""

from __future__ import annotations

import json
import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from datetime import date
from enum import Enum
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from tools.table.rows import ROOT
from vllm_mamba_retire.releases import SCHEMA, Matrix

FILE = ROOT / "compat_matrix.schema.json"


def schema() -> dict[str, Any]:
    """The JSON Schema of the table."""
    whole = _of(Matrix)
    whole["properties"]["schema"] = {"const": SCHEMA}
    whole["required"].append("schema")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "compat_matrix.yaml: what is known of each vLLM release",
        **whole,
    }


def text() -> str:
    """The file."""
    return json.dumps(schema(), indent=2) + "\n"


def _of(kind: Any) -> dict[str, Any]:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return {**_of(arguments[0]), "pattern": f"^{arguments[1].pattern}$"}
    if origin in (Union, types.UnionType):
        return {"anyOf": [_of(arguments[0]), {"type": "null"}]}
    if origin is tuple:
        return {"type": "array", "items": _of(arguments[0])}
    if origin is Mapping:
        return {"type": "object", "additionalProperties": _of(arguments[1])}
    if is_dataclass(kind):
        return _record(kind)
    if kind is date:
        return {"type": "string", "format": "date"}
    if issubclass(kind, Enum):
        return {"enum": [member.value for member in kind]}
    return {"type": {int: "integer", str: "string"}[kind]}


def _record(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind, include_extras=True)
    known = [field for field in fields(kind) if field.init]
    return {
        "type": "object",
        "additionalProperties": False,
        "required": [
            field.name
            for field in known
            if field.default is MISSING and field.default_factory is MISSING
        ],
        "properties": {field.name: _of(hints[field.name]) for field in known},
    }


if __name__ == "__main__":
    FILE.write_text(text())
