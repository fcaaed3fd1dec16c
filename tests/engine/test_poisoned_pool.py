"""Freed states are overwritten at once, and the answers stay those of a pool without reuse.

The control frees one block too many. The package's own probe refuses it, so it is put on by force;
on the poisoned pool its answers are not the right ones.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from proof.poison import PoisonError, run
from proof.wrong_fixes import WRONG_FIXES
from test_traffic import BUSY, FINISHED, TIGHT

import vllm_mamba_retire
from vllm_mamba_retire.matrix import Status
from vllm_mamba_retire.replay.engine import EngineRun, Workload

ROOT = Path(__file__).parents[2]
PACKAGE = Path(vllm_mamba_retire.__file__).parent


def path(release: str, trees: Path, package: Path = PACKAGE) -> str:
    return os.pathsep.join(map(str, (package.parent, trees / release, ROOT)))


@pytest.mark.about(Status.LIVE)
@pytest.mark.parametrize("pool", [None, TIGHT], ids=["roomy", "tight"])
def test_answers_are_those_of_a_pool_that_reuses_nothing(
    pool: int | None, release: str, trees: Path, stock: Callable[[Workload], EngineRun]
) -> None:
    roomy = stock(BUSY)
    poisoned = run(replace(BUSY, pool=pool), path=path(release, trees))
    assert poisoned.overwritten > 20
    assert poisoned.run.verdict == "patched"
    assert poisoned.run.freed_beyond_stock > 0
    assert poisoned.run.nothing_left
    for name in FINISHED:
        assert poisoned.run.answers[name].tokens == roomy.answers[name].tokens


@pytest.mark.about(Status.LIVE)
def test_a_block_too_many_is_noticed(
    release: str, trees: Path, tmp_path: Path, stock: Callable[[Workload], EngineRun]
) -> None:
    mutant = tmp_path / "vllm_mamba_retire"
    shutil.copytree(PACKAGE, mutant, ignore=shutil.ignore_patterns("__pycache__"))
    (too_many,) = (fix for fix in WRONG_FIXES if fix.name == "frees one block too many")
    module = mutant / f"{too_many.module}.py"
    module.write_text(too_many.of(module.read_text()))
    right = stock(BUSY).answers
    try:
        wrong = run(BUSY, path=path(release, trees, mutant), trusted=True).run.answers
    except PoisonError as error:
        assert "is free and in its table" in str(error)  # noqa: PT017 (either way is noticed)
        return
    assert any(wrong[name].tokens != right[name].tokens for name in FINISHED)
