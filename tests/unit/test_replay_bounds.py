"""The closed form, against the figures that upstream and deployers published."""

from __future__ import annotations

import pytest

from vllm_mamba_retire.plan.bounds import Geometry, mib

GLM = Geometry(block=3584, budget=8192, spec=5, lag=2)
FIELD = Geometry(block=1568, budget=4096, groups=3)


@pytest.mark.parametrize(("lag", "fixed"), [(0, 7), (1, 8), (2, 9)])
def test_the_fix_bounds_states_by_spec_plus_two_plus_lag(lag: int, fixed: int) -> None:
    for block in (3584, 4608):
        assert Geometry(block, 8192, spec=5, lag=lag).fixed_states(480_031) == fixed


def test_only_chunks_over_two_blocks_with_one_in_flight_leak() -> None:
    assert FIELD.leaks
    assert not Geometry(1568, 4096, lag=0).leaks
    assert not Geometry(1568, 3135).leaks
    assert Geometry(1568, 3136).leaks


def test_stock_keeps_a_state_per_chunk() -> None:
    assert FIELD.stock_states(237_000) == 77
    assert Geometry(1568, 3135).stock_states(237_000) == 3


def test_the_smallest_pools_of_the_field_report() -> None:
    assert FIELD.pool(237_000, FIELD.stock_states(237_000)) == 384
    assert FIELD.pool(237_000, FIELD.fixed_states(237_000)) == 162


def test_a_short_prompt_holds_no_more_states_than_it_has_blocks() -> None:
    assert FIELD.stock_states(1_000) == FIELD.fixed_states(1_000) == 1


@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.parametrize("pool", [10, 162, 325, 384, 5_000])
def test_the_longest_prompt_fits_and_a_block_more_does_not(pool: int, fixed: bool) -> None:
    def needed(tokens: int) -> int:
        states = FIELD.fixed_states(tokens) if fixed else FIELD.stock_states(tokens)
        return FIELD.pool(tokens, states)

    longest = FIELD.longest_prompt(pool, fixed=fixed)
    assert needed(longest) <= pool < needed(longest + FIELD.block)


def test_concurrency_counts_whole_requests_at_their_worst_moment() -> None:
    one = FIELD.request_blocks(60_000, FIELD.fixed_states(60_000))
    assert FIELD.concurrency(3 * one + 1, 60_000, fixed=True) == 3
    assert FIELD.concurrency(3 * one, 60_000, fixed=True) == 2


def test_the_glm_layout_in_mib_from_its_bytes_per_token() -> None:
    mla_row = 512 + 4 * 4 + 64 * 2  # FP8 latent, its four FP32 scales, the BF16 rotary part
    indexer_row = (128 + 4) // 4  # an FP8 key and its scale for every four tokens
    block_bytes = (11 + 1) * GLM.block * (mla_row + indexer_row)  # layers and the drafter's one
    assert round(mib(71, block_bytes), 2) == 2006.44
    assert round(mib(GLM.fixed_states(480_031), block_bytes), 2) == 254.34
