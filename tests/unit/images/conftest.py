"""A table that knows the small stand-in source of these tests as vLLM 0.29.0 and 0.30.0."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.unit.images.image_making import NATIVE_SOURCE, SOURCE, Docker
from vllm_mamba_retire.images import inspection
from vllm_mamba_retire.releases import Matrix, load_matrix


@functools.cache
def stand_ins() -> Matrix:
    real = load_matrix()
    sources = {"0.29.0": SOURCE, "0.30.0": NATIVE_SOURCE}
    rows = tuple(
        replace(row, manager_sha256=hashlib.sha256(sources[row.version]).hexdigest())
        for row in real.releases
        if row.version in sources
    )
    return replace(real, releases=rows)


@pytest.fixture(autouse=True)
def stand_in_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspection, "load_matrix", stand_ins)


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Docker:
    folder = tmp_path / "docker"
    folder.mkdir()
    return Docker(folder, monkeypatch)
