"""What the fix does to prefix-cache hits; docs/prefix-cache.md tells it in words."""

from __future__ import annotations

from vllm_mamba_retire.releases import Status
from vllm_mamba_retire.replay.sides import Comparison

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


def test_a_prefix_that_only_the_leak_kept_alive_is_lost_with_the_fix(
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
