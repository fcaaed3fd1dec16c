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
    """What the class does with the newest cached state, as the probe observed it."""

    KEEPS = "keeps"
    PLAIN = "plain"  # evicts it in the order of retirement, as vLLM 0.30.0 does
    WRONG = "wrong"  # neither, or the free queue is not consistent


def probe_keep(module: ModuleType, manager_class: type) -> tuple[KeepOutcome, str]:
    """Run the class on one request whose state is retired before another prompt ends.

    Args:
        module: the imported ``single_type_kv_cache_manager`` of a release that retires.
        manager_class: class to test.

    Returns:
        The outcome, and the reason in words. An exception from the probed code is `WRONG`.
    """

    def evicted_last(**after: bool) -> bool | None:
        return _evicted_last(build_manager(module, _BLOCK, _POOL, manager_class), **after)

    try:
        running, ended = evicted_last(), evicted_last(ended=True)
        reused = evicted_last(reused=True)
    except Exception as error:
        return KeepOutcome.WRONG, f"{type(error).__name__}: {error}"
    if reused is not False:
        return KeepOutcome.WRONG, "a block was moved that holds another state by now"
    if running is None or running is not ended:
        return KeepOutcome.WRONG, "the free queue is not consistent"
    if running:
        return KeepOutcome.KEEPS, "the newest state is evicted after the others"
    return KeepOutcome.PLAIN, "the newest state is evicted in the order of retirement"


def _evicted_last(manager: Any, *, ended: bool = False, reused: bool = False) -> bool | None:
    """Retire a request's first state, then free a block of another prompt.

    Args:
        manager: one without requests.
        ended: the request ends afterwards; by default it is scheduled once more.
        reused: the block of the state holds another state by then.

    Returns:
        Whether the block of the state is evicted last; None if the queue is not consistent.
    """
    exempt(manager)
    pool = manager.block_pool
    state, other, needed = pool.get_new_blocks(3)
    state.set_block_hash(b"state")
    other.set_block_hash(b"other")
    manager.req_to_blocks[_REQUEST] = [state, needed]
    manager.remove_skipped_blocks(_REQUEST, 2 * _BLOCK, _BLOCK)
    if reused:
        state.reset_hash()
        state.set_block_hash(b"another state")
    pool.free_blocks([other])
    if ended:
        manager.free(_REQUEST)
    else:
        manager.remove_skipped_blocks(_REQUEST, 2 * _BLOCK, _BLOCK)
    free = pool.free_block_queue.get_all_free_blocks()
    held = [] if ended else [needed]
    everything = {id(block) for block in pool.blocks if not block.is_null}
    if (
        len(free) != pool.get_num_free_blocks()
        or {id(block) for block in [*free, *held]} != everything
        or any(block.ref_cnt for block in free)
        or any(block.ref_cnt != 1 for block in held)
    ):
        return None
    return free[-1] is state
