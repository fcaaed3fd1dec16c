"""The demonstration says so when something is not as it must be."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tools.engine.demo import CASES, REQUEST, TIGHT, DemoRow, judge
from tools.engine.harness import Answer, EngineRun, EngineStep

STOCK, PATCHED, STOCK_TIGHT = (
    DemoRow(1, None, False),
    DemoRow(1, None, True),
    DemoRow(1, TIGHT, False),
)


def a_run(case: DemoRow) -> EngineRun:
    held = case.bound if case.patched else 18
    rolled_back = int(bool(case.pool) and not case.patched)
    return EngineRun(
        vllm="0.29.0",
        verdict="patched" if case.patched else "off",
        freed_beyond_stock=0,
        refreshed=0,
        cache_mode="align",
        block=1152,
        groups=3,
        steps=[EngineStep(2304, 0.1, 50, {REQUEST: [list(range(held))] * 3}, rolled_back)],
        answers={REQUEST: Answer([1, 2, 3])},
        pool=79,
        free_after=79,
        referenced_after=0,
        watermarks_after=0,
    )


@pytest.fixture
def runs() -> dict[DemoRow, EngineRun]:
    return {case: a_run(case) for case in CASES}


def test_all_well_is_no_problem(runs: dict[DemoRow, EngineRun]) -> None:
    assert list(judge(runs)) == []


@pytest.mark.parametrize(
    ("case", "changed", "sentence"),
    [
        (PATCHED, {"answers": {REQUEST: Answer([1, 2, 4])}}, "the output differs"),
        (PATCHED, {"free_after": 78}, "left when everything has ended"),
        (PATCHED, {"watermarks_after": 1}, "left when everything has ended"),
        (PATCHED, {"verdict": "drifted"}, "the package did not patch"),
        (PATCHED, {"steps": a_run(STOCK).steps}, "18 states, more than 3"),
        (PATCHED, {"steps": [EngineStep(9, 0.1, 5, {}, 1)]}, "rolled back 1 times"),
        (STOCK, {"verdict": "patched"}, "this is not stock vLLM"),
        (STOCK, {"steps": a_run(PATCHED).steps}, "does not show the defect"),
        (STOCK_TIGHT, {"steps": a_run(STOCK).steps}, "so the pool is not tight"),
    ],
)
def test_each_problem_is_named(
    case: DemoRow, changed: dict[str, object], sentence: str, runs: dict[DemoRow, EngineRun]
) -> None:
    runs[case] = replace(runs[case], **changed)  # type: ignore[arg-type]
    (problem,) = judge(runs)
    assert problem.startswith(f"{case.name}: ")
    assert sentence in problem
