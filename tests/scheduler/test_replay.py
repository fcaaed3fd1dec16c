"""What a replay does where things get tight: several requests, stuck pools, the lag's edges."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest

from vllm_mamba_retire.child import ChildError
from vllm_mamba_retire.releases import Status
from vllm_mamba_retire.replay.scenario import Arrival, Scenario
from vllm_mamba_retire.replay.sides import STOCK, Comparison, compare, replay_all

BLOCK, BUDGET = 1568, 4096
Child = Callable[..., "subprocess.CompletedProcess[str]"]


def _scenario(name: str, *arrivals: Arrival, **more: object) -> Scenario:
    given = {"groups": 3, "retention_interval": 0, **more}
    return Scenario(name, BLOCK, BUDGET, arrivals, **given)  # type: ignore[arg-type]


SCENARIOS = {
    scenario.id: scenario
    for scenario in (
        # Two states and its drafts' blocks fit, the state in flight beside them does not.
        _scenario("no room", Arrival("a", 9_000, 5), spec=3, pool=22),
        _scenario("pair", Arrival("a", 60_000, 5), Arrival("b", 30_000, 5, at=3), lag=2),
        _scenario("waiting", Arrival("a", 5_000, 5), Arrival("b", 9_000, 2, after="a")),
        _scenario("late", Arrival("a", 5_000, 5), Arrival("b", 9_000, 2, at=10_000)),
        _scenario("short", Arrival("a", 10), Arrival("b", BLOCK), Arrival("c", BLOCK + 1)),
        _scenario("accepting", Arrival("a", 9_000, 30), spec=3, accepted=3),
        _scenario("rejecting", Arrival("a", 9_000, 30), spec=3),
        _scenario("in step", Arrival("a", 9_000, 30), spec=3, accepted=3, lag=0),
    )
}


@pytest.fixture(scope="module")
def pairs() -> dict[str, Comparison]:
    return {pair.scenario.id: pair for pair in compare(list(SCENARIOS.values()))}


def test_a_replay_that_cannot_go_on_says_so_and_at_which_step(
    pairs: dict[str, Comparison], stays_stuck: bool
) -> None:
    pair = pairs["no room"]
    for run in (pair.stock, pair.fixed):
        assert sum(step.preempted for step in run.steps) > 1
        if stays_stuck:
            last = len(run.steps)
            assert run.stuck == f"requests keep rolling each other back (after step {last})"
            assert not run.ended
        else:
            assert run.stuck is None
            assert run.ended.keys() == {"a"}


def test_a_request_that_is_never_admitted_is_stuck_too(child: Child) -> None:
    answer = child(
        "from vllm_mamba_retire.replay.scenario import Arrival, Scenario\n"
        "from vllm_mamba_retire.replay.scheduler import replay\n"
        "scenario = Scenario('a', 1568, 4096, (Arrival('a', 237_000),), groups=3)\n"
        "object.__setattr__(scenario, 'pool', 100)  # what its own check refuses\n"
        "print(replay(scenario).stuck)",
        MAMBA_RETIRE="off",
    )
    assert answer.stdout.splitlines()[-1].startswith("nothing can be scheduled: the pool has no")


def test_every_request_ends_and_every_token_is_computed_once(pairs: dict[str, Comparison]) -> None:
    for name in ("pair", "waiting", "late", "short"):
        arrivals = SCENARIOS[name].arrivals
        for run in (pairs[name].stock, pairs[name].fixed):
            assert run.stuck is None
            assert run.ended.keys() == {arrival.id for arrival in arrivals}
            # The last sampled token is never computed; one more may be in flight by then.
            least = sum(arrival.prompt + arrival.output - 1 for arrival in arrivals)
            assert least <= run.scheduled_tokens <= least + len(arrivals)


def test_requests_arrive_at_their_step_or_after_another_request(
    pairs: dict[str, Comparison],
) -> None:
    run = pairs["pair"].fixed
    assert [step.running + step.waiting for step in run.steps[:5]] == [1, 1, 1, 2, 2]
    waiting = pairs["waiting"].fixed
    assert waiting.ended["a"] < waiting.ended["b"]
    assert {step.running + step.waiting for step in waiting.steps} <= {0, 1}


def test_no_request_waits_for_a_step_that_is_never_reached(
    pairs: dict[str, Comparison],
) -> None:
    assert len(pairs["late"].fixed.steps) < 100


def test_two_long_requests_hold_the_states_of_both(
    pairs: dict[str, Comparison], status: Status
) -> None:
    pair = pairs["pair"]
    bound = 2 + SCENARIOS["pair"].lag
    assert max(max(step.states) for step in pair.fixed.steps) <= 2 * bound
    leaks = max(max(step.states) for step in pair.stock.steps) > 2 * bound
    assert leaks is (status is Status.LIVE)


def test_accepted_drafts_save_steps_with_and_without_a_lag(pairs: dict[str, Comparison]) -> None:
    rejecting = len(pairs["rejecting"].fixed.steps)
    for name in ("accepting", "in step"):
        assert len(pairs[name].fixed.steps) < rejecting


def test_without_a_vllm_the_replay_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH")
    with pytest.raises(ChildError, match=r"No vLLM is installed .*No module named 'vllm'"):
        replay_all(list(SCENARIOS.values()), STOCK, path=["."])
