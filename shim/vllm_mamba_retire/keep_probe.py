"""Tests whether a live `MambaManager` class keeps the newest cached state of a request.

The test runs the release's own manager and block pool, with eight blocks of four tokens. On the
class without the patch it must answer `PLAIN`; any behaviour that is neither is `WRONG`.
"""

from __future__ import annotations

from enum import Enum
from types import ModuleType
from typing import Any

from .binding import exempt
from .probe import build_manager

_BLOCK = 4  # tokens
_POOL = 8  # blocks, the null block among them
_REQUEST = "mamba-retire-probe"


class KeepOutcome(str, Enum):
    """What the class does with the newest cached state, as the probe observed."""

    KEEPS = "keeps"
    PLAIN = "plain"  # evicts it in the order of retirement, as vLLM 0.30.0 does
    WRONG = "wrong"  # neither, or the free queue is not as it should be


def probe_keep(module: ModuleType, manager_class: type) -> tuple[KeepOutcome, str]:
    """Run the class on one request whose state is retired before another prompt ends.

    Args:
        module: the imported ``single_type_kv_cache_manager`` of a release that retires.
        manager_class: class to test.

    Returns:
        The outcome and what led to it. An exception out of the probed code is `WRONG`.
    """
    try:
        running, ended, reused = (
            test(build_manager(module, _BLOCK, _POOL, manager_class))
            for test in (_while_it_runs, _when_it_ends, _with_a_reused_block)
        )
    except Exception as error:
        return KeepOutcome.WRONG, f"{type(error).__name__}: {error}"
    if reused is not False:
        return KeepOutcome.WRONG, "a block was moved that holds another state by now"
    if running is None or ended is None or running is not ended:
        return KeepOutcome.WRONG, "the free queue is not as it should be"
    if running:
        return KeepOutcome.KEEPS, "the newest state is evicted after the others"
    return KeepOutcome.PLAIN, "the newest state is evicted in the order of retirement"


def _while_it_runs(manager: Any) -> bool | None:
    """Whether the state is evicted last; None where the queue is not consistent."""
    state, other, last = _retired_state(manager)
    manager.block_pool.free_blocks([other])
    _schedule(manager)
    return _evicted_last(manager, state, held=[last])


def _when_it_ends(manager: Any) -> bool | None:
    state, other, _last = _retired_state(manager)
    manager.block_pool.free_blocks([other])
    manager.free(_REQUEST)
    return _evicted_last(manager, state, held=[])


def _with_a_reused_block(manager: Any) -> bool | None:
    state, other, last = _retired_state(manager)
    state.reset_hash()
    state.set_block_hash(b"another state")
    manager.block_pool.free_blocks([other])
    _schedule(manager)
    return _evicted_last(manager, state, held=[last])


def _retired_state(manager: Any) -> tuple[Any, Any, Any]:
    """A request whose first state is retired, another's cached block, the state still needed."""
    exempt(manager)
    state, other, last = manager.block_pool.get_new_blocks(3)
    state.set_block_hash(b"state")
    other.set_block_hash(b"other")
    manager.req_to_blocks[_REQUEST] = [state, last]
    _schedule(manager)
    return state, other, last


def _schedule(manager: Any) -> None:
    manager.remove_skipped_blocks(_REQUEST, 2 * _BLOCK, _BLOCK)


def _evicted_last(manager: Any, state: Any, held: list[Any]) -> bool | None:
    pool = manager.block_pool
    free = pool.free_block_queue.get_all_free_blocks()
    everything = {id(block) for block in pool.blocks if not block.is_null}
    if (
        len(free) != pool.get_num_free_blocks()
        or {id(block) for block in [*free, *held]} != everything
        or any(block.ref_cnt for block in free)
        or any(block.ref_cnt != 1 for block in held)
    ):
        return None
    return free[-1] is state
