"""Real trees, copied from a release and then changed as people change them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.detection.sites import Site, copied
from vllm_mamba_retire.evidence import collect_evidence
from vllm_mamba_retire.releases import Matrix
from vllm_mamba_retire.target import read_target
from vllm_mamba_retire.verdict import Verdict, decide


@pytest.fixture
def site(tmp_path: Path, trees: Path) -> Callable[..., Site]:
    """Makes a tree of a release that a test may change."""

    def make(version: str, name: str = "site") -> Site:
        return copied(trees / version, tmp_path / name)

    return make


@pytest.fixture
def seen(matrix: Matrix) -> Callable[[Site], Verdict]:
    """The verdict on a tree that nobody imported."""

    def look(site: Site) -> Verdict:
        return decide(collect_evidence(read_target(site.package), matrix))

    return look
