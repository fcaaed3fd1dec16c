"""Keeping the newest state in a real engine: a conversation's hits, and the same answers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tools.engine.harness import Action, Workload
from tools.engine.poison import run

from tests.engine.workloads import BUSY, BUSY_TIGHT, FINISHED, Measure
from vllm_mamba_retire.releases import Status
from vllm_mamba_retire.replay.sides import KEPT

pytestmark = pytest.mark.about(Status.LIVE, Status.NATIVE)

FIRST = (1, 6_000)  # five blocks and a bit
# Five other prompts pass while the answer to the first turn is generated; then comes the next turn.
TURNS = Workload(
    (
        Action("add", "first", prompt=(FIRST,), output=60),
        *(Action("add", f"other {n}", at=8 + 8 * n, prompt=((10 + n, 6_000),)) for n in range(5)),
        Action("add", "next", at=None, prompt=(FIRST, (2, 1_000)), output=16),
    ),
    pool=40,
    max_tokens=10_000,
)


def test_next_turn_hits_the_cache_and_the_answer_is_the_same(
    stock: Measure, patched: Measure, kept: Measure
) -> None:
    sides = [measure(TURNS) for measure in (stock, patched, kept)]
    assert [side.refreshed > 0 for side in sides] == [False, False, True]
    block = sides[0].block
    assert [side.answers["next"].cached for side in sides] == [0, 0, 5 * block]
    for name, answer in sides[0].answers.items():
        assert [side.answers[name].tokens for side in sides] == [answer.tokens] * 3
    assert all(side.nothing_left for side in sides)


@pytest.mark.parametrize("lag", [1, 2])
@pytest.mark.parametrize("work", [BUSY, BUSY_TIGHT], ids=["ample", "tight"])
def test_answers_on_a_poisoned_pool_equal_those_without_reuse(
    work: Workload, lag: int, stock: Measure
) -> None:
    expected = stock(replace(BUSY, lag=lag))
    poisoned = run(replace(work, lag=lag), side=KEPT)
    assert poisoned.overwritten > 20
    assert poisoned.run.refreshed > 0
    assert poisoned.run.nothing_left
    for name in FINISHED:
        assert poisoned.run.answers[name].sha == expected.answers[name].sha


def test_a_state_that_is_hit_on_a_poisoned_pool_is_the_right_one(stock: Measure) -> None:
    poisoned = run(TURNS, side=KEPT)
    assert poisoned.run.answers["next"].cached == 5 * poisoned.run.block
    expected = stock(TURNS).answers
    assert {n: a.sha for n, a in poisoned.run.answers.items()} == {
        name: answer.sha for name, answer in expected.items()
    }
