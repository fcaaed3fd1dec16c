"""The retirement on a release's own manager and pool, each check with its control."""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType
from typing import Any

import pytest

from vllm_mamba_retire import binding
from vllm_mamba_retire.probe import build_manager
from vllm_mamba_retire.releases import Status
from vllm_mamba_retire.replay.manager import live_states, peak_states

PROMPT, BUDGET, SPEC = 480_031, 8192, 5  # tokens, tokens, blocks: the replay of vllm#55450


def peak(block: int, lag: int) -> int:
    return peak_states(block, SPEC, BUDGET, PROMPT, lag)


@pytest.mark.about(Status.LIVE)
@pytest.mark.parametrize(("lag", "bound"), [(0, 7), (1, 8), (2, 9)])
def test_peak_is_the_bound_with_the_fix(lag: int, bound: int, patched: object) -> None:
    assert peak(3584, lag) == bound


@pytest.mark.about(Status.LIVE)
@pytest.mark.parametrize(("lag", "states"), [(0, 7), (1, 71), (2, 71)])
def test_peak_grows_with_the_prompt_on_stock(lag: int, states: int) -> None:
    assert peak(3584, lag) == states


@pytest.mark.about(Status.NATIVE)
@pytest.mark.parametrize(("lag", "bound"), [(0, 7), (1, 8), (2, 9)])
def test_native_release_holds_the_same_bound(lag: int, bound: int) -> None:
    assert peak(3584, lag) == bound


@pytest.mark.about(Status.LIVE)
@pytest.mark.parametrize("lag", [0, 1, 2])
def test_one_block_a_chunk_is_the_same_with_and_without(lag: int, module: ModuleType) -> None:
    stock = peak(4608, lag)
    binding.install(module.MambaManager)
    fixed = peak(4608, lag)
    binding.uninstall(module.MambaManager)
    assert stock == fixed == 7 + lag


def gap_table(manager: Any, request: str = "r") -> list[Any]:
    """``[old, null, committed, in flight]``: what a two-block chunk leaves behind."""
    pool = manager.block_pool
    old, committed, in_flight = pool.get_new_blocks(3)
    table = [old, pool.null_block, committed, in_flight]
    manager.req_to_blocks[request] = table
    return table


def nulls(table: Iterable[Any]) -> list[bool]:
    return [block.is_null for block in table]


@pytest.mark.about(Status.LIVE)
def test_stock_keeps_the_state_before_the_gap(manager: Any) -> None:
    table = gap_table(manager)
    old = table[0]
    for _ in range(2):
        manager.remove_skipped_blocks("r", 12)
    assert table[0] is old
    assert old.ref_cnt == 1
    assert manager.block_pool.get_num_free_blocks() == 4


@pytest.mark.about(Status.LIVE)
def test_state_before_the_gap_is_freed_once(patched: object, manager: Any) -> None:
    table = gap_table(manager)
    old, _, committed, in_flight = table
    for _ in range(2):
        manager.remove_skipped_blocks("r", 12)
        assert nulls(table) == [True, True, False, False]
        assert (old.ref_cnt, committed.ref_cnt, in_flight.ref_cnt) == (0, 1, 1)
        assert manager.block_pool.get_num_free_blocks() == 5


@pytest.mark.about(Status.LIVE)
def test_id_used_again_starts_at_the_first_block(patched: object, manager: Any) -> None:
    gap_table(manager)
    manager.remove_skipped_blocks("r", 12)
    manager.free("r")
    assert manager.block_pool.get_num_free_blocks() == 7
    assert manager._num_retired_blocks == {}
    assert manager._mamba_retirement.tables == {}
    table = manager.req_to_blocks["r"] = manager.block_pool.get_new_blocks(2)
    manager.remove_skipped_blocks("r", 5)
    assert nulls(table) == [True, False]


@pytest.mark.about(Status.LIVE)
def test_table_replaced_without_a_pop_starts_at_the_first_block(
    patched: object, manager: Any
) -> None:
    gap_table(manager)
    manager.remove_skipped_blocks("r", 12)
    assert manager._num_retired_blocks == {"r": 2}
    table = gap_table(manager)
    manager.remove_skipped_blocks("r", 12)
    assert nulls(table) == [True, True, False, False]


@pytest.mark.about(Status.NATIVE)
def test_native_keeps_a_replaced_table_under_the_old_watermark(manager: Any) -> None:
    """The risk that vLLM leaves open, and why the watermark here remembers its table."""
    gap_table(manager)
    manager.remove_skipped_blocks("r", 12)
    table = gap_table(manager)
    manager.remove_skipped_blocks("r", 12)
    assert nulls(table) == [False, True, False, False]


@pytest.mark.about(Status.LIVE)
def test_manager_older_than_the_patch_is_retired_too(manager: Any, module: ModuleType) -> None:
    table = gap_table(manager)
    manager.remove_skipped_blocks("r", 12)
    assert nulls(table) == [False, True, False, False]
    binding.install(module.MambaManager)
    try:
        manager.remove_skipped_blocks("r", 12)
        assert nulls(table) == [True, True, False, False]
        manager.free("r")
    finally:
        binding.uninstall(module.MambaManager)
    assert manager.block_pool.get_num_free_blocks() == 7


@pytest.mark.about(Status.LIVE)
def test_request_freed_before_it_ever_had_blocks(patched: object, manager: Any) -> None:
    manager.free("never seen")
    manager._remove_blocks_in_range("never seen", 0, 3)
    assert manager.block_pool.get_num_free_blocks() == 7
    assert "never seen" not in manager.req_to_blocks
    assert manager._num_retired_blocks == {}


@pytest.mark.about(Status.LIVE)
def test_states_go_back_in_one_call_last_block_first(
    patched: object, manager: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = manager.block_pool
    a, b, c = pool.get_new_blocks(3)
    manager.req_to_blocks["r"] = [a, pool.null_block, b, pool.null_block, c]
    returned: list[list[Any]] = []
    monkeypatch.setattr(pool, "free_blocks", lambda blocks: returned.append(list(blocks)))
    manager._remove_blocks_in_range("r", 0, 5)
    assert returned == [[c, b, a]]


@pytest.mark.about(Status.LIVE)
def test_nothing_to_free_does_not_disturb_the_pool(
    patched: object, manager: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager.req_to_blocks["r"] = [manager.block_pool.null_block] * 4
    monkeypatch.setattr(manager.block_pool, "free_blocks", pytest.fail)
    manager._remove_blocks_in_range("r", 0, 4)
    assert manager._num_retired_blocks == {"r": 4}


@pytest.mark.about(Status.LIVE)
def test_range_past_the_table_is_clamped_and_counted(
    patched: binding.Installation, manager: Any
) -> None:
    table = gap_table(manager)
    manager._remove_blocks_in_range("r", 0, 9)
    assert nulls(table) == [True] * 4
    assert manager._num_retired_blocks == {"r": 4}
    assert patched.counters.ranges_clamped == 1


@pytest.mark.about(Status.LIVE)
def test_counters_tell_what_stock_would_have_kept(
    patched: binding.Installation, manager: Any
) -> None:
    pool = manager.block_pool
    a, b, c = pool.get_new_blocks(3)
    manager.req_to_blocks["r"] = [a, pool.null_block, b, c, pool.null_block]
    manager._remove_blocks_in_range("r", 0, 4)  # stock frees c and b, then meets the gap
    counters = patched.counters
    assert (counters.calls, counters.states_freed, counters.states_stock_would_keep) == (1, 3, 1)


@pytest.mark.about(Status.LIVE)
@pytest.mark.parametrize(("lag", "kept"), [(0, 0), (1, 63), (2, 62)])
def test_counter_of_kept_states_is_what_stock_was_seen_to_keep(
    lag: int, kept: int, patched: binding.Installation, module: ModuleType
) -> None:
    fixed = list(live_states(3584, SPEC, BUDGET, PROMPT, lag))
    counted = patched.counters.states_stock_would_keep
    binding.uninstall(module.MambaManager)
    stock = list(live_states(3584, SPEC, BUDGET, PROMPT, lag))
    binding.install(module.MambaManager)
    assert counted == stock[-1] - fixed[-1] == kept


class CountingTable(list):  # type: ignore[type-arg]
    """A block table that notes which blocks are looked at."""

    def __init__(self, blocks: Iterable[Any]) -> None:
        super().__init__(blocks)
        self.looked_at: list[int] = []

    def __getitem__(self, index: Any) -> Any:
        self.looked_at.append(index)
        return super().__getitem__(index)


@pytest.mark.about(Status.LIVE)
def test_no_block_is_looked_at_twice(patched: object, module: ModuleType) -> None:
    manager = build_manager(module, block=4, pool=64)
    pool = manager.block_pool
    table = CountingTable(
        pool.get_new_blocks(1)[0] if index % 2 else pool.null_block for index in range(40)
    )
    manager.req_to_blocks["r"] = table
    for end in range(0, 36, 3):
        manager._remove_blocks_in_range("r", 0, end)
        manager._remove_blocks_in_range("r", 0, end)
    assert sorted(table.looked_at) == list(range(33))


@pytest.mark.about(Status.LIVE)
@pytest.mark.parametrize("mode", ["none", "all"])
def test_other_cache_modes_go_to_vllms_own_method(
    mode: str,
    patched: binding.Installation,
    manager: Any,
    monkeypatch: pytest.MonkeyPatch,
    module: ModuleType,
) -> None:
    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        module.SingleTypeKVCacheManager,
        binding.REMOVE_RANGE,
        lambda self, *arguments: seen.append((self, *arguments)),
    )
    manager.mamba_cache_mode = mode
    manager._remove_blocks_in_range("r", 1, 3)
    assert seen == [(manager, "r", 1, 3)]
    assert patched.counters.calls == 0


@pytest.mark.about(Status.LIVE)
def test_no_other_manager_class_is_touched(patched: object, module: ModuleType) -> None:
    changed = [
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and any(binding.is_ours(vars(value).get(name)) for name in binding.RETIREMENT.methods)
    ]
    assert changed == [module.MambaManager]
