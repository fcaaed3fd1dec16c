"""A patched live release against 0.30.0 on the scheduler: each release's own, the same traffic.

Equal in every step: tokens scheduled, live states per group, blocks in use, requests running and
waiting, tokens found cached and computed again, preemptions.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tools.proof.compare import Variant
from tools.proof.scenarios import seeded

from vllm_mamba_retire.replay.runs import Run
from vllm_mamba_retire.replay.scenario import Scenario
from vllm_mamba_retire.replay.sides import FIXED, STOCK, replay_all

SCENARIOS = 25


def run(scenarios: Sequence[Scenario], side: Variant) -> list[Run]:
    return replay_all(scenarios, FIXED if side.use == "patched" else STOCK, path=[side.tree])


def differing(ours: list[Run], theirs: list[Run]) -> list[int]:
    return [
        seed
        for seed, (mine, other) in enumerate(zip(ours, theirs, strict=True))
        if (mine.steps, mine.ended, mine.hits) != (other.steps, other.ended, other.hits)
    ]


@pytest.fixture(scope="module")
def scenarios() -> list[Scenario]:
    return [seeded(number) for number in range(SCENARIOS)]


@pytest.fixture(scope="module")
def expected(scenarios: list[Scenario], native: Variant) -> list[Run]:
    return run(scenarios, native)


def test_patched_schedules_as_native_does(
    scenarios: list[Scenario], expected: list[Run], patched: Variant
) -> None:
    ours = run(scenarios, patched)
    assert sum(len(each.steps) for each in ours) > 1000
    assert differing(ours, expected) == []


def test_stock_does_not(scenarios: list[Scenario], expected: list[Run], stock: Variant) -> None:
    assert differing(run(scenarios, stock), expected)
