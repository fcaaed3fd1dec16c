"""Feeds one cold prompt to the `MambaManager` of the vLLM imported in this process.

The smallest replay: the release's own manager and block pool, a list of chunk ends and a lag; no
scheduler, no other request, a pool that is never exhausted. It does not depend on the fix: it
measures the methods that the class has when it runs.
"""

from __future__ import annotations

from collections.abc import Iterator

from vllm_mamba_retire.probe import build_manager, call_known

from .scenario import InputError

_REQUEST = "replay"


def chunk_ends(block: int, budget: int, prompt: int) -> list[int]:
    """Return the prefix lengths (tokens) at which a cold prompt's full chunks end in align mode.

    A full chunk is as many whole blocks as the budget holds. The scheduler decides how the rest of
    the prompt is cut (`scheduler` replays it); it is left out here, as in the replay that
    vllm#55450 takes its figures from. A prompt below one full chunk counts as one chunk.
    """
    if budget < block:
        raise InputError(f"budget: {budget} tokens hold no block of {block} tokens.")
    stride = budget // block * block
    return list(range(stride, prompt + 1, stride)) or [prompt]


def block_tables(
    block: int, spec: int, budget: int, prompt: int, lag: int
) -> Iterator[list[int | None]]:
    """Return one Mamba group's block table after each full chunk's allocation; None for null.

    `block`, `budget` and `prompt` are in tokens, `spec` is `num_speculative_blocks`, `lag` the
    number of chunks scheduled but not yet settled. Blocks are retired up to the last settled
    chunk, as `KVCacheManager.allocate_slots` does since vllm#47728.
    """
    from vllm.v1.core import single_type_kv_cache_manager as managers

    ends = chunk_ends(block, budget, prompt)
    # Room for every state at once, the speculative blocks and the null block.
    manager = build_manager(managers, block, pool=prompt // block + 2 * spec + 5, spec=spec)
    settled = [0] * (lag + 1) + ends
    for start, end, processed in zip([0, *ends], ends, settled, strict=False):
        if start:
            manager.remove_skipped_blocks(_REQUEST, processed)
        call_known(
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
        table = manager.req_to_blocks[_REQUEST]
        yield [None if block.is_null else block.block_id for block in table]


def live_states(block: int, spec: int, budget: int, prompt: int, lag: int) -> Iterator[int]:
    """Return the live states of a group after each full chunk's allocation; see `block_tables`."""
    for table in block_tables(block, spec, budget, prompt, lag):
        yield sum(state is not None for state in table)


def peak_states(block: int, spec: int, budget: int, prompt: int, lag: int) -> int:
    """Return the most live states that one group holds for one cold prompt; see `live_states`."""
    return max(live_states(block, spec, budget, prompt, lag))
