"""The small release of `small_release`, and a tree of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.patchset.small_release import RELEASED, Checkout, known
from vllm_mamba_retire.patchset.operations import Known


@pytest.fixture
def small(tmp_path: Path) -> Known:
    """Table and series of the small release."""
    return known(tmp_path / "patches")


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    """The small release as released."""
    tree = Checkout(tmp_path / "site")
    tree.write("vllm/_version.py", "__version__ = version = '0.29.0'\n")
    tree.write("tests/v1/core/__init__.py", "")
    for path, text in RELEASED.items():
        tree.write(path, text)
    return tree
