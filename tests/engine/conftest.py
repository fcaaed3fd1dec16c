"""The engine lane: a real vLLM engine on a CPU, each run in a process of its own."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import pytest
from packaging.version import Version
from tools.engine.harness import EngineRun, Workload, run

from tests.engine.workloads import Measure
from vllm_mamba_retire.replay.sides import FIXED, KEPT, STOCK, Side

NATIVE = "0.30.0"  # the first release that carries the fix
_SPARSE = Version("0.29")  # from here on a prompt leaves no checkpoints for hits unless asked to
_DENSE = (("prefix_cache_retention_interval", None),)


@functools.cache  # the same run serves several tests
def _measured(workload: Workload, side: Side, *path: Path) -> EngineRun:
    return run(workload, side=side, path=path)


@pytest.fixture(scope="session")
def stock() -> Measure:
    """The release as published: the control."""
    return lambda workload: _measured(workload, STOCK)


@pytest.fixture(scope="session")
def patched() -> Measure:
    """The release with this package, which leaves releases that carry the fix alone."""
    return lambda workload: _measured(workload, FIXED)


@pytest.fixture(scope="session")
def kept() -> Measure:
    """The release with this package and the newest states kept."""
    return lambda workload: _measured(workload, KEPT)


@pytest.fixture(scope="session")
def native(release: str, trees: Path) -> Measure:
    """The first release that carries the fix itself, keeping what `release` keeps for hits."""
    options = _DENSE if Version(release) < _SPARSE else ()
    return lambda workload: _measured(
        replace(workload, options=(*workload.options, *options)), STOCK, trees / NATIVE
    )
