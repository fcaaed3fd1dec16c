"""The small release of `small_release`, and a tree of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.patchset.small_release import make_matrix, make_series, make_site
from vllm_mamba_retire import patchset
from vllm_mamba_retire.releases import Matrix


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Matrix:
    """Matrix of the small release; its series is the one that the package finds."""
    monkeypatch.setattr(patchset, "series_folder", lambda: tmp_path / "patches")
    return make_matrix(make_series(tmp_path / "patches"))


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """The small release as released."""
    return make_site(tmp_path / "site")
