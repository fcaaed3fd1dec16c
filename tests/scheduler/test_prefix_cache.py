"""What the fix does to prefix-cache hits; docs/prefix-cache.md tells it in words."""

from __future__ import annotations

from vllm_mamba_retire.plan.bounds import Geometry
from vllm_mamba_retire.releases import Status
from vllm_mamba_retire.replay.scenario import Arrival, Scenario
from vllm_mamba_retire.replay.sides import FIXED, KEPT, Comparison, compare

Replays = dict[str, list[Comparison]]


def test_states_given_back_make_room_for_hits_under_pressure(
    replays: Replays, status: Status
) -> None:
    (pair,) = replays["turns-under-pressure"]
    gained = pair.fixed.hit_tokens - pair.stock.hit_tokens
    assert gained > 0 if status is Status.LIVE else gained == 0
    assert pair.fixed.rollbacks <= pair.stock.rollbacks


def test_without_pressure_the_hits_are_the_same(replays: Replays) -> None:
    (pair,) = replays["shared-prefix-roomy"]
    assert pair.fixed.hits == pair.stock.hits
    assert pair.fixed.hit_tokens > 0


def test_a_prefix_kept_only_by_the_leak_is_lost_with_the_fix(
    replays: Replays, status: Status
) -> None:
    (pair,) = replays["unpinned-states-are-evicted"]
    kept = pair.stock.hits["sharing"]
    assert kept > 0 if status is Status.LIVE else kept == 0
    assert pair.fixed.hits["sharing"] == 0


def test_the_next_turn_finds_the_state_that_the_fix_alone_loses(replays: Replays) -> None:
    for name in ("next-dense-240", "next-0-240", "resend-dense-240", "resend-0-240"):
        (replayed,) = replays[name]
        assert replayed.fixed.hit_tokens == 0
        assert replayed.kept.hit_tokens == 100_352


def test_plan_predicts_how_many_prompts_evict_a_state() -> None:
    prompt, pool = 40_000, 240
    told = Geometry(1568, 4096, groups=3).prompts_until_evicted(pool, prompt)
    assert told > 2
    for passing, found in ((told - 1, True), (told, False)):
        others = (
            Arrival(f"p{n}", prompt, after=f"p{n - 1}" if n else None, at=30)
            for n in range(passing)
        )
        turns = Arrival("a", prompt, 500), Arrival("b", prompt + 2000, text="a", after="a")
        scenario = Scenario(
            f"{passing} pass",
            *(1568, 4096, (turns[0], *others, turns[1])),
            groups=3,
            pool=pool,
            retention_interval="dense",
        )
        (replayed,) = compare([scenario], (FIXED, KEPT))
        assert (replayed.fixed.hits["b"] > 0) is found
        assert replayed.kept.hits["b"] > 0
