"""A table that knows the small stand-in source of these tests as vLLM 0.29.0 and 0.30.0."""

from __future__ import annotations

import hashlib

import pytest
from msgspec.structs import replace

from tests.unit.images.image_making import NATIVE_SOURCE, SOURCE
from vllm_mamba_retire.images import inspection
from vllm_mamba_retire.releases import Matrix, load_matrix


@pytest.fixture(autouse=True)
def stand_in_table(monkeypatch: pytest.MonkeyPatch) -> Matrix:
    real = load_matrix()
    sources = {"0.29.0": SOURCE, "0.30.0": NATIVE_SOURCE}
    rows = tuple(
        replace(row, manager_sha256=hashlib.sha256(sources[row.version]).hexdigest())
        for row in real.releases
        if row.version in sources
    )
    table = replace(real, releases=rows)
    monkeypatch.setattr(inspection, "load_matrix", lambda: table)
    return table
