"""One long cold prompt: what it holds, what it costs, what it answers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tools.engine.harness import Action, Workload

from tests.engine.workloads import LONG, LONG_TIGHT, OUTPUT, PROMPT, Measure
from vllm_mamba_retire.releases import Status

AMPLE_STEPS = 25
STOCK_STATES = 18  # one per chunk, with any lag
# Mamba2 beside attention in every layer; here a chunk holds two blocks of 640 tokens.
FALCON = Workload(
    (Action("add", "long", prompt=((0, 12_000),), output=OUTPUT),), model="falcon_h1", budget=1400
)


@pytest.mark.about(Status.LIVE)
@pytest.mark.parametrize("lag", [1, 2])
def test_stock_keeps_a_state_per_chunk(lag: int, stock: Measure) -> None:
    assert stock(replace(LONG, lag=lag)).peak == STOCK_STATES


@pytest.mark.parametrize("lag", [1, 2])
def test_peak_is_bounded_by_the_lag(lag: int, patched: Measure) -> None:
    run = patched(replace(LONG, lag=lag))
    assert run.peak == 2 + lag
    assert run.nothing_left


@pytest.mark.about(Status.LIVE)
@pytest.mark.parametrize("lag", [1, 2])
def test_answer_is_that_of_stock_to_the_last_bit(
    lag: int, stock: Measure, patched: Measure
) -> None:
    work = replace(LONG, lag=lag)
    ours, theirs = patched(work).answers["long"], stock(work).answers["long"]
    assert len(ours.tokens) == OUTPUT
    assert (ours.tokens, ours.logprobs) == (theirs.tokens, theirs.logprobs)


def test_answer_depends_on_the_first_token(patched: Measure) -> None:
    """The control of every "same output": a state lost on the way would be seen."""
    other = Action("add", "long", prompt=((1, 1), (0, PROMPT - 1)), output=OUTPUT)
    run = patched(replace(LONG, actions=(other,)))
    assert run.answers["long"].tokens != patched(LONG).answers["long"].tokens


@pytest.mark.about(Status.LIVE)
def test_stock_is_rolled_back_in_a_tight_pool(stock: Measure) -> None:
    """0.29.0 keeps no checkpoints of a prompt by default: what is rolled back is computed again.
    Before, a prefix hit on the request's own states takes it back to where it was."""
    run = stock(LONG_TIGHT)
    if run.vllm == "0.29.0":
        assert (run.preemptions, run.scheduled, len(run.steps)) == (2, 74_567, 40)
    else:
        assert (run.preemptions, run.scheduled) == (1, PROMPT + OUTPUT - 1)


def test_tight_pool_costs_nothing(patched: Measure, stock: Measure) -> None:
    run = patched(LONG_TIGHT)
    assert run.preemptions == 0
    assert (run.scheduled, len(run.steps)) == (PROMPT + OUTPUT - 1, AMPLE_STEPS)
    assert run.answers["long"].tokens == stock(LONG).answers["long"].tokens
    assert run.nothing_left


def test_without_a_lag_nothing_changes(stock: Measure, patched: Measure) -> None:
    work = replace(LONG, lag=0, actions=(replace(LONG.actions[0], prompt=((0, 9_000),)),))
    ours, theirs = patched(work), stock(work)
    assert ours.peak == theirs.peak == 2
    assert [step.states for step in ours.steps] == [step.states for step in theirs.steps]


@pytest.mark.about(Status.LIVE)
def test_another_architecture(stock: Measure, patched: Measure) -> None:
    ours, theirs = patched(FALCON), stock(FALCON)
    assert theirs.peak == 10
    assert ours.peak == 3
    assert ours.answers["long"].tokens == theirs.answers["long"].tokens
    assert ours.answers["long"].logprobs == theirs.answers["long"].logprobs


@pytest.mark.about(Status.LIVE)
@pytest.mark.parametrize("lag", [1, 2])
def test_every_table_is_that_of_the_native_fix(lag: int, patched: Measure, native: Measure) -> None:
    work = replace(LONG, lag=lag)
    ours, theirs = patched(work), native(work)
    assert theirs.verdict == "off"
    assert [step.states for step in ours.steps] == [step.states for step in theirs.steps]
    assert [step.used for step in ours.steps] == [step.used for step in theirs.steps]
