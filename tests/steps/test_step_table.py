"""Upstream's end-to-end step table holds on stock, and with the fix but for the line it changed.

Upstream's own test needs a GPU. On a patched release it fails in one step, and must: the fix frees
a state that the table of that release still expects to be held.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vllm_mamba_retire.releases import Matrix, Status

STEPS = 154  # 77 with synchronous scheduling, 77 with asynchronous
FREED = 4  # block of async prompt_10_block_size that upstream's fix frees in its last step
_FILE = "tests/v1/e2e/general/test_mamba_prefix_cache.py"


@functools.cache
def drive(table_of: str, *, patched: bool) -> dict[str, Any]:
    """Drive some release's table through the scheduler of the release on the path."""
    sources = Path(os.environ["MAMBA_RETIRE_TEST_SOURCES"])
    answer = subprocess.run(
        [sys.executable, Path(__file__).with_name("step_table.py"), sources / table_of / _FILE],
        env={
            **os.environ,
            "MAMBA_RETIRE": "require" if patched else "off",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "HF_HUB_OFFLINE": "1",
        },
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return dict(json.loads(answer.stdout.splitlines()[-1]))


@pytest.fixture(scope="session")
def native(matrix: Matrix) -> str:
    """The first release that carries the fix itself."""
    return next(row.version for row in matrix.releases if row.status is Status.NATIVE)


def test_stock_holds_every_step_of_its_own_table(release: str) -> None:
    assert drive(release, patched=False) == {"steps": STEPS, "differences": []}


def test_the_fix_changes_exactly_the_step_that_upstream_changed(
    release: str, status: Status
) -> None:
    outcome = drive(release, patched=True)
    assert outcome["steps"] == STEPS
    if status is Status.NATIVE:
        assert outcome["differences"] == []
        return
    (difference,) = outcome["differences"]
    assert (difference["mode"], difference["case"]) == ("async", "prompt_10_block_size")
    assert difference["last"]
    (tokens, held), (got_tokens, got_held) = difference["expected"], difference["got"]
    assert got_tokens == tokens
    changed = {
        i: pair for i, pair in enumerate(zip(held, got_held, strict=True)) if len({*pair}) > 1
    }
    assert changed == {FREED: (1, 0)}


@pytest.mark.about(Status.LIVE)
def test_patched_passes_every_step_of_the_native_releases_table(native: str) -> None:
    assert drive(native, patched=True) == {"steps": STEPS, "differences": []}


@pytest.mark.about(Status.LIVE)
def test_stock_fails_the_table_of_the_native_release(native: str) -> None:
    """The control of the one above."""
    assert len(drive(native, patched=False)["differences"]) == 1
