"""Every geometry from the field, on the release on the path, stock and fixed."""

from __future__ import annotations

from vllm_mamba_retire.plan.bounds import Geometry
from vllm_mamba_retire.releases import Status
from vllm_mamba_retire.replay.cases import Case
from vllm_mamba_retire.replay.expectations import differences
from vllm_mamba_retire.replay.sides import Comparison

Replays = dict[str, list[Comparison]]


def test_a_case_gives_its_figures(
    any_case: Case, replays: Replays, release: str, status: Status
) -> None:
    native = status is Status.NATIVE
    own = ("stock",) if any_case.holds_on(release) and not native else ()
    sides = (*own, "fixed", "kept")
    assert differences(any_case, replays[any_case.id], sides=sides) == []


def test_every_field_geometry_has_figures_for_every_live_release(
    field_case: Case, release: str, status: Status
) -> None:
    assert field_case.holds_on(release) or status is Status.NATIVE


def test_each_side_runs_as_it_is_called(any_case: Case, replays: Replays, status: Status) -> None:
    expected = {Status.LIVE: "patched", Status.NATIVE: "native"}[status]
    for pair in replays[any_case.id]:
        assert (pair.stock.verdict, pair.fixed.verdict) == ("off", expected)


def test_keeping_the_newest_state_costs_nothing_that_the_fix_has(
    any_case: Case, replays: Replays
) -> None:
    for replayed in replays[any_case.id]:
        fixed, kept = replayed.fixed, replayed.kept
        assert kept.hit_tokens >= fixed.hit_tokens
        assert kept.scheduled_tokens <= fixed.scheduled_tokens
        assert kept.rollbacks <= fixed.rollbacks
        assert kept.peak_states <= fixed.peak_states
        # With drafts the conversation ends while another prompt is computed: a hit refers to all of
        # its blocks beside that one, computing them takes until it has ended.
        if not replayed.scenario.spec:
            assert kept.peak_used <= fixed.peak_used


def test_only_what_leaks_differs_between_the_sides(
    field_case: Case, replays: Replays, status: Status
) -> None:
    for pair in replays[field_case.id]:
        leaks = status is Status.LIVE and _geometry(pair).leaks
        assert (pair.stock.steps != pair.fixed.steps) is leaks


def test_the_fix_keeps_the_bound_and_leaking_stock_breaks_it(
    field_case: Case, replays: Replays, status: Status
) -> None:
    for pair in replays[field_case.id]:
        bound = pair.scenario.spec + 2 + pair.scenario.lag
        assert pair.fixed.peak_states <= bound
        leaks = status is Status.LIVE and _geometry(pair).leaks
        assert (pair.stock.peak_states > bound) is leaks


def test_the_closed_form_agrees_with_the_scheduler(
    field_case: Case, replays: Replays, status: Status
) -> None:
    for pair in replays[field_case.id]:
        geometry, longest = _geometry(pair), pair.scenario.arrivals[0].prompt
        assert pair.fixed.peak_states == geometry.fixed_states(longest)
        if status is Status.LIVE and not pair.stock.rollbacks:
            above = geometry.stock_states(longest) - pair.stock.peak_states
            assert above in ((0, 1, 2) if geometry.leaks else (0,))


def _geometry(pair: Comparison) -> Geometry:
    scenario = pair.scenario
    return Geometry(scenario.block, scenario.budget, scenario.spec, scenario.lag, scenario.groups)
