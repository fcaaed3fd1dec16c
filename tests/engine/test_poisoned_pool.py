"""Freed states are overwritten at once, and the answers stay those of a pool without reuse.

The controls free a block too many. The package's own probe refuses them, so they are put on by
force; on the poisoned pool their answers are not the right ones.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from tools.engine.harness import Workload
from tools.engine.poison import TRUSTED, run
from tools.proof.wrong_fixes import WRONG_FIXES

import vllm_mamba_retire
from tests.engine.workloads import BUSY, BUSY_TIGHT, FINISHED, Measure
from vllm_mamba_retire.releases import Status

PACKAGE = Path(vllm_mamba_retire.__file__).parent


@pytest.mark.about(Status.LIVE)
@pytest.mark.parametrize("lag", [1, 2, 3])
@pytest.mark.parametrize("work", [BUSY, BUSY_TIGHT], ids=["ample", "tight"])
def test_answers_are_those_of_a_pool_that_reuses_nothing(
    work: Workload, lag: int, stock: Measure
) -> None:
    expected = stock(replace(BUSY, lag=lag))
    poisoned = run(replace(work, lag=lag))
    assert poisoned.overwritten > 20
    assert poisoned.run.verdict == "patched"
    assert poisoned.run.freed_beyond_stock > 0
    assert poisoned.run.nothing_left
    for name in FINISHED:
        assert poisoned.run.answers[name].tokens == expected.answers[name].tokens


@pytest.mark.about(Status.LIVE)
@pytest.mark.parametrize(
    ("lag", "name"), [(0, "frees one block too many"), (1, "frees two too many")], ids=["0", "1"]
)
def test_a_state_still_to_be_read_is_noticed(
    lag: int, name: str, tmp_path: Path, stock: Measure
) -> None:
    """A CPU has done the step in flight when the next is scheduled: with lag 1, one block too many
    is the state that this step has read already, and only two reach the one still to be read."""
    mutant = tmp_path / "vllm_mamba_retire"
    shutil.copytree(PACKAGE, mutant, ignore=shutil.ignore_patterns("__pycache__"))
    (too_many,) = (fix for fix in WRONG_FIXES if fix.name == name)
    module = mutant / f"{too_many.module}.py"
    module.write_text(too_many.of(module.read_text()))
    work = replace(BUSY, lag=lag)
    wrong = run(work, side=TRUSTED, path=[tmp_path]).run.answers
    right = stock(work).answers
    assert any(wrong[each].tokens != right[each].tokens for each in FINISHED)
