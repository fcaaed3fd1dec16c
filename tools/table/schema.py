"""Writes compat_matrix.schema.json from the structs: ``python -m tools.table.schema``."""

from __future__ import annotations

import json

from msgspec.json import schema

from tools.table.rows import ROOT
from vllm_mamba_retire.releases import Matrix

FILE = ROOT / "compat_matrix.schema.json"


def text() -> str:
    """Return the text of the file."""
    return json.dumps(schema(Matrix), indent=2) + "\n"


if __name__ == "__main__":
    FILE.write_text(text())
