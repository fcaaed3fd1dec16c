"""The engine lane: a real vLLM engine on a CPU, each run in a process of its own."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_mamba_retire.replay.engine import EngineRun, Workload, run

NATIVE = "0.30.0"  # the first release that carries the fix

Measure = Callable[[Workload], EngineRun]


@functools.cache  # the same run serves several tests
def _measured(workload: Workload, patched: bool, path: str | None) -> EngineRun:
    return run(workload, patched=patched, path=path)


@pytest.fixture(scope="session")
def stock() -> Measure:
    """The release as published: the control."""
    return lambda workload: _measured(workload, False, None)


@pytest.fixture(scope="session")
def patched() -> Measure:
    """The release with this package, which leaves releases that carry the fix alone."""
    return lambda workload: _measured(workload, True, None)


@pytest.fixture(scope="session")
def native(release: str, trees: Path) -> Measure:
    """The first release that carries the fix itself."""
    path = os.environ["PYTHONPATH"].replace(str(trees / release), str(trees / NATIVE))
    return lambda workload: _measured(workload, False, path)
