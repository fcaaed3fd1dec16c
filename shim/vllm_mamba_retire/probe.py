"""Tests whether a live `MambaManager` class retires a state that lies before a null gap.

The test runs the release's own code, its manager, block pool and spec, with a pool of eight blocks
and the smallest table that shows the defect: ``[old, null, committed, in flight]``.
The probe can fail both ways: on the stock class of a live release it must answer `STOPS_AT_GAP`,
and any behaviour that is neither the defect nor the fix is `WRONG`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from .binding import exempt
from .evidence import Outcome

_BLOCK = 4  # tokens
_POOL = 8  # blocks, the null block among them
_REQUEST = "mamba-retire-probe"


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What the class did, and the first deviation from the expected.

    `error` is an exception from the probed code: the release may lack what the probe uses.
    """

    outcome: Outcome
    detail: str
    error: Exception | None = None

    @property
    def retires_across_gap(self) -> bool:
        """Whether the class behaves as vLLM 0.30.0 does."""
        return self.outcome is Outcome.RETIRES


def probe(module: ModuleType, manager_class: type | None = None) -> ProbeResult:
    """Run the class on the smallest table that shows the defect.

    Args:
        module: the imported ``single_type_kv_cache_manager`` of some release, 0.25.0 or later.
        manager_class: class to test; by default the module's `MambaManager`.

    Returns:
        The outcome. An exception from the probed code is an outcome too (`WRONG`).
    """
    try:
        manager = build_manager(module, _BLOCK, _POOL, manager_class)
        exempt(manager)
        return _test_gap(manager)
    except Exception as error:
        return ProbeResult(Outcome.WRONG, f"{type(error).__name__}: {error}", error)


def _test_gap(manager: Any) -> ProbeResult:
    pool, null = manager.block_pool, manager.block_pool.null_block
    old, committed, in_flight = pool.get_new_blocks(3)
    table = manager.req_to_blocks[_REQUEST] = [old, null, committed, in_flight]
    # 12 settled tokens fill three blocks; the state of the last settled token is in the third.
    for _ in range(2):
        manager.remove_skipped_blocks(_REQUEST, 12)
        if table[2] is not committed or table[3] is not in_flight or table[1] is not null:
            return ProbeResult(Outcome.WRONG, "a state that is still needed left the table")
        if (committed.ref_cnt, in_flight.ref_cnt) != (1, 1):
            return ProbeResult(Outcome.WRONG, "a state that is still needed lost its reference")
    free = pool.get_num_free_blocks()
    if table[0] is old and old.ref_cnt == 1 and free == _POOL - 4:
        return ProbeResult(Outcome.STOPS_AT_GAP, "the state before the gap is kept")
    if table[0] is not null or old.ref_cnt != 0 or free != _POOL - 3:
        return ProbeResult(Outcome.WRONG, "the state before the gap was not freed exactly once")
    manager.remove_skipped_blocks(_REQUEST, 16)  # the step in flight is settled
    if table[2] is not null or committed.ref_cnt or in_flight.ref_cnt != 1:
        return ProbeResult(Outcome.WRONG, "a state was not freed when the next one was settled")
    return _test_reuse(manager)


def _test_reuse(manager: Any) -> ProbeResult:
    """Reuse the id of an ended request: no watermark of the first request may be left."""
    pool, null = manager.block_pool, manager.block_pool.null_block
    manager.free(_REQUEST)
    if pool.get_num_free_blocks() != _POOL - 1:
        return ProbeResult(Outcome.WRONG, "blocks are missing from the pool after the request")
    first, second = pool.get_new_blocks(2)
    table = manager.req_to_blocks[_REQUEST] = [first, second]
    manager.remove_skipped_blocks(_REQUEST, 5)
    if table[0] is not null or table[1] is not second or second.ref_cnt != 1:
        return ProbeResult(Outcome.WRONG, "a request whose id was used before is not retired")
    manager.free(_REQUEST)
    return ProbeResult(Outcome.RETIRES, "the state before the gap is freed once")


def build_manager(
    module: ModuleType,
    block: int,
    pool: int,
    manager_class: type | None = None,
    spec: int = 0,
) -> Any:
    """Build a real manager in align mode on a block pool of its own, outside any engine.

    Args:
        module: the imported ``single_type_kv_cache_manager`` of some release.
        block: block size in tokens.
        pool: blocks in the pool, the null block among them.
        manager_class: class to build; by default the module's `MambaManager`.
        spec: speculative blocks per request (`num_speculative_blocks`).
    """
    import torch  # vLLM's manager module has imported it already

    state = call_known(
        module.MambaSpec,
        block_size=block,
        shapes=((1,),),
        dtypes=(torch.float32,),
        mamba_cache_mode="align",
        num_speculative_blocks=spec,
    )
    return call_known(
        manager_class or module.MambaManager,
        module.SingleTypeKVCacheManager,
        kv_cache_spec=state,
        block_pool=call_known(
            module.BlockPool, num_gpu_blocks=pool, enable_caching=True, hash_block_size=block
        ),
        enable_caching=True,
        kv_cache_group_id=0,
        scheduler_block_size=block,
    )


def call_known(
    function: Callable[..., Any], declared_by: Callable[..., Any] | None = None, **offered: Any
) -> Any:
    """Call `function` with those of the offered arguments that its signature has.

    Constructor signatures differ between releases; unknown arguments are dropped.

    Args:
        function: what to call.
        declared_by: the function whose signature to read if `function` takes ``**kwargs``.
        offered: arguments by name.
    """
    known = inspect.signature(declared_by or function).parameters
    return function(**{name: value for name, value in offered.items() if name in known})
