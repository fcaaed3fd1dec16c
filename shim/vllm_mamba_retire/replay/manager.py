"""Feeds one cold prompt to the `MambaManager` of the vLLM imported in this process.

The smallest replay there is: the release's own manager and block pool, a list of chunk ends and
a lag; no scheduler, no other request, a pool that never runs dry. It knows nothing of the fix:
whatever is bound to the class when it runs is what gets measured.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

_REQUEST = "replay"


def chunk_ends(block: int, budget: int, prompt: int) -> list[int]:
    """Prefix lengths (tokens) at which a cold prompt's prefill chunks end in align mode.

    Every chunk ends on a block boundary, the last boundary inside the prompt is one of them, and
    the rest of the prompt follows in a chunk of its own (`Scheduler._mamba_block_aligned_split`).
    """
    if budget < block:
        raise ValueError(f"budget: {budget} tokens hold no block of {block} tokens")
    stride = budget // block * block
    last_boundary = prompt // block * block
    ends = list(range(stride, last_boundary, stride))
    return [end for end in (*ends, last_boundary) if end] + [prompt] * (prompt > last_boundary)


def live_states(block: int, spec: int, budget: int, prompt: int, lag: int) -> Iterator[int]:
    """Live states (non-null blocks) of one Mamba group after each prefill chunk's allocation.

    `block`, `budget` and `prompt` are in tokens, `spec` is `num_speculative_blocks`, `lag` the
    number of chunks scheduled but not yet settled. Blocks are retired up to the last settled
    chunk, as `KVCacheManager.allocate_slots` does since vllm#47728.
    """
    ends = chunk_ends(block, budget, prompt)
    manager = _build_manager(block, spec, blocks=prompt // block + 2 * spec + 4)
    settled = [0] * (lag + 1) + ends
    for start, end, processed in zip([0, *ends], ends, settled, strict=False):
        if start:
            manager.remove_skipped_blocks(_REQUEST, processed)
        _call(
            manager.get_num_blocks_to_allocate,
            request_id=_REQUEST,
            num_tokens=end,
            new_computed_blocks=[],
            total_computed_tokens=start,
            num_local_computed_tokens=0,
            num_tokens_main_model=end,
            prefill_end=prompt,
        )
        manager.allocate_new_blocks(_REQUEST, end, end)
        yield sum(not block.is_null for block in manager.req_to_blocks[_REQUEST])


def peak_states(block: int, spec: int, budget: int, prompt: int, lag: int) -> int:
    """Most live states one Mamba group ever holds for one cold prompt; see `live_states`."""
    return max(live_states(block, spec, budget, prompt, lag))


def _build_manager(block: int, spec: int, blocks: int) -> Any:
    import torch
    from vllm.v1.core import single_type_kv_cache_manager as managers
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.kv_cache_interface import MambaSpec

    state = MambaSpec(
        block_size=block,
        shapes=((1,),),
        dtypes=(torch.float32,),
        mamba_cache_mode="align",
        num_speculative_blocks=spec,
    )
    # One block more: the pool keeps one as the null block.
    pool = BlockPool(num_gpu_blocks=blocks + 1, enable_caching=True, hash_block_size=block)
    return managers.MambaManager(
        state,
        **_accepted(
            managers.SingleTypeKVCacheManager.__init__,
            block_pool=pool,
            enable_caching=True,
            kv_cache_group_id=0,
            scheduler_block_size=block,
        ),
    )


def _call(function: Callable[..., Any], **offered: Any) -> Any:
    return function(**_accepted(function, **offered))


def _accepted(function: Callable[..., Any], **offered: Any) -> dict[str, Any]:
    """The offered arguments this release's signature has: they came one by one over releases."""
    known = inspect.signature(function).parameters
    return {name: value for name, value in offered.items() if name in known}
