"""Every geometry from the field, on the release on the path, stock and fixed."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_mamba_retire.matrix import Status
from vllm_mamba_retire.replay.bounds import Geometry
from vllm_mamba_retire.replay.cases import Case, read_cases
from vllm_mamba_retire.replay.compare import Pair, compare
from vllm_mamba_retire.replay.expectations import differences

CASES = read_cases(Path(__file__).parents[1] / "cases" / "field_cases.yaml")
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)

Replays = dict[str, list[Pair]]


@pytest.fixture(scope="session")
def replays() -> Replays:
    pairs = iter(compare([scenario for case in CASES for scenario in case.scenarios]))
    return {case.id: [next(pairs) for _ in case.scenarios] for case in CASES}


@each_case
def test_a_case_gives_its_figures(
    case: Case, replays: Replays, release: str, status: Status
) -> None:
    if status is Status.NATIVE:
        assert differences(case, replays[case.id], sides=["fixed"]) == []
    else:
        assert case.holds_on(release)
        assert differences(case, replays[case.id]) == []


@each_case
def test_only_a_live_release_differs_from_its_fixed_self(
    case: Case, replays: Replays, status: Status
) -> None:
    expected = {Status.LIVE: "patched", Status.NATIVE: "native"}[status]
    for pair in replays[case.id]:
        assert pair.fixed.verdict == expected
        assert pair.stock.verdict == "off"
        leaks = status is Status.LIVE and _geometry(pair).leaks
        assert (pair.stock.steps != pair.fixed.steps) is leaks


@each_case
def test_the_fix_keeps_the_bound_and_stock_breaks_it_where_it_leaks(
    case: Case, replays: Replays, status: Status
) -> None:
    for pair in replays[case.id]:
        bound = pair.scenario.spec + 2 + pair.scenario.lag
        assert pair.fixed.peak_states <= bound
        leaks = status is Status.LIVE and _geometry(pair).leaks
        assert (pair.stock.peak_states > bound) is leaks


@each_case
def test_the_closed_form_agrees_with_the_scheduler(
    case: Case, replays: Replays, status: Status
) -> None:
    for pair in replays[case.id]:
        geometry, longest = _geometry(pair), pair.scenario.arrivals[0].prompt
        assert pair.fixed.peak_states == geometry.fixed_states(longest)
        if status is Status.LIVE and not pair.stock.rollbacks:
            above = geometry.stock_states(longest) - pair.stock.peak_states
            assert above in (0, 1, 2) if geometry.leaks else above == 0


def _geometry(pair: Pair) -> Geometry:
    scenario = pair.scenario
    return Geometry(scenario.block, scenario.budget, scenario.spec, scenario.lag, scenario.groups)
