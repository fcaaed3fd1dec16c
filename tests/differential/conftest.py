"""Two releases side by side: the one under test, patched, and 0.30.0, which carries the fix."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tools.proof.compare import MANAGER_FILE, Variant
from tools.table import rows as table

NATIVE = "0.30.0"
STEPS_VARIABLE = "MAMBA_RETIRE_PROOF_STEPS"


@pytest.fixture(scope="session")
def steps() -> int:
    """Operations per comparison, of which there are four."""
    return int(os.environ.get(STEPS_VARIABLE, "7000"))


@pytest.fixture(scope="session")
def patched(trees: Path, release: str) -> Variant:
    return Variant(trees / release, "patched")


@pytest.fixture(scope="session")
def stock(trees: Path, release: str) -> Variant:
    return Variant(trees / release, "as-is")


@pytest.fixture(scope="session")
def native(trees: Path) -> Variant:
    return Variant(trees / NATIVE, "as-is")


@pytest.fixture(scope="session")
def newest(trees: Path) -> Variant:
    return Variant(trees / table.versions("native")[-1], "as-is")


@pytest.fixture(scope="session")
def graft(trees: Path, release: str) -> Variant:
    return Variant(trees / release, "graft", trees / NATIVE / MANAGER_FILE)
