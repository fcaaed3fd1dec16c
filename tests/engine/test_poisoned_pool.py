"""Freed states are overwritten at once, and the answers stay those of a pool without reuse.

The controls free a block too many. The package's own probe refuses them, so they are put on by
force; on the poisoned pool their answers are not the right ones.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tools.engine.harness import Workload
from tools.engine.poison import TRUSTED, run
from tools.proof.wrong_fixes import package_with

from tests.engine.workloads import BUSY, BUSY_TIGHT, FINISHED, Measure
from vllm_mamba_retire.releases import Status


@pytest.mark.about(Status.LIVE)
@pytest.mark.parametrize("lag", [1, 2, 3])
@pytest.mark.parametrize(
    ("work", "late"), [(BUSY, True), (BUSY_TIGHT, False)], ids=["ample, late", "tight"]
)
def test_answers_are_those_of_a_pool_that_reuses_nothing(
    work: Workload, late: bool, lag: int, stock: Measure
) -> None:
    """The tight pool preempts; vLLM itself frees what the steps in flight of such a request read,
    and still delivers their tokens. Only steps computed in order are right then."""
    expected = stock(replace(BUSY, lag=lag))
    poisoned = run(replace(work, lag=lag), late=late)
    assert poisoned.overwritten > 20
    assert poisoned.run.verdict == "patched"
    assert poisoned.run.freed_beyond_stock > 0
    assert poisoned.run.nothing_left
    for name in FINISHED:
        assert poisoned.run.answers[name].tokens == expected.answers[name].tokens


@pytest.mark.about(Status.LIVE)
@pytest.mark.parametrize("lag", [0, 1, 2, 3])
def test_a_state_still_to_be_read_is_noticed(lag: int, tmp_path: Path, stock: Measure) -> None:
    mutant = package_with("frees one block too many", tmp_path)
    work = replace(BUSY, lag=lag)
    wrong = run(work, side=TRUSTED, path=[mutant], late=True).run.answers
    right = stock(work).answers
    assert any(wrong[each].tokens != right[each].tokens for each in FINISHED)
