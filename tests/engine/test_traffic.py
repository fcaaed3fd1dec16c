"""Several requests: sharing, waiting, going away, coming back."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tools.engine.harness import Action, Workload

from tests.engine.workloads import BUSY, BUSY_TIGHT, FINISHED, Measure
from vllm_mamba_retire.releases import Status


@pytest.mark.about(Status.LIVE)
def test_busy_engine_answers_as_stock_does(stock: Measure, patched: Measure) -> None:
    ours, theirs = patched(BUSY), stock(BUSY)
    assert theirs.peak > 3 >= ours.peak
    for name in FINISHED:
        assert ours.answers[name].tokens == theirs.answers[name].tokens
        assert ours.answers[name].logprobs == theirs.answers[name].logprobs
    assert ours.answers["leaves"].tokens == []
    assert ours.nothing_left


@pytest.mark.about(Status.LIVE)
def test_busy_engine_holds_the_tables_of_the_native_fix(patched: Measure, native: Measure) -> None:
    ours, theirs = patched(BUSY), native(BUSY)
    assert [step.states for step in ours.steps] == [step.states for step in theirs.steps]


def test_preempted_requests_resume(stock: Measure, patched: Measure) -> None:
    run = patched(BUSY_TIGHT)
    assert run.preemptions > 0
    assert run.peak <= 3
    for name in FINISHED:
        assert len(run.answers[name].tokens) == len(stock(BUSY).answers[name].tokens)
    assert run.nothing_left


AGAIN = Workload(
    (
        Action("add", "id", prompt=((1, 12_000),)),
        Action("add", "id", at=None, prompt=((2, 14_000),)),
        Action("add", "new", at=None, prompt=((3, 14_000),)),
    )
)


def test_request_id_used_again_starts_from_nothing(patched: Measure) -> None:
    """As on a fresh engine, whatever the first request left behind.

    vLLM adds a random tail to a client's id, and its workers need that: they fail on an id that
    is the same inside. The managers' own case of it is in tests/release.
    """
    run = patched(AGAIN)
    new = [step.states["new"] for step in run.steps if "new" in step.states]
    used_twice = [step.states["id"] for step in run.steps if "id" in step.states]
    assert used_twice[-len(new) :] == new
    assert run.peak == 3
    assert run.nothing_left


REPEAT = Workload(
    (
        Action("add", "cold", prompt=((1, 12_000),)),
        Action("add", "warm", at=None, prompt=((1, 12_000),)),
        Action("reset_prefix_cache", at=None),
        Action("add", "reset", at=None, prompt=((1, 12_000),)),
    )
)


def test_prefix_hits_are_those_of_stock(stock: Measure, patched: Measure) -> None:
    ours, theirs = patched(REPEAT), stock(REPEAT)
    hits = {name: answer.cached for name, answer in ours.answers.items()}
    assert hits == {name: answer.cached for name, answer in theirs.answers.items()}
    assert hits["warm"] > 9_000
    assert hits["cold"] == hits["reset"] == 0


def test_answer_from_the_prefix_cache_is_the_cold_one(patched: Measure) -> None:
    run = patched(REPEAT)
    cold, warm, reset = (run.answers[name].tokens for name in ("cold", "warm", "reset"))
    assert cold == warm == reset
    assert run.nothing_left


def test_without_prefix_caching_nothing_is_touched(stock: Measure, patched: Measure) -> None:
    """In `none` mode a request has one state; `all` mode has no kernel on this CPU path."""
    work = replace(REPEAT, actions=REPEAT.actions[:1], cache_mode="none")
    ours, theirs = patched(work), stock(work)
    assert ours.cache_mode == "none"
    assert ours.freed_beyond_stock == 0
    assert [step.states for step in ours.steps] == [step.states for step in theirs.steps]
    assert ours.answers["cold"].logprobs == theirs.answers["cold"].logprobs
