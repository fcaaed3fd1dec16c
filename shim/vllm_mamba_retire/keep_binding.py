"""Defines the patch that keeps the newest cached state of running requests (`keep`).

It is installed on top of the retirement patch or on a release that has the fix. Both methods call
the method that they replace and do not change what it does: states retire at the same time, in the
same order.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final
from weakref import ref

from .binding import POP_BLOCKS, Installation, Patch, replaced
from .keep import KeepCounters, Keeping, Order

REMOVE_SKIPPED: Final = "remove_skipped_blocks"
_STATE: Final = "_mamba_keeping"
_QUEUE_MODULE: Final = "vllm.v1.core.kv_cache_utils"
_logger = logging.getLogger("vllm.mamba_retire")


def _start(manager: Any, installed: Installation) -> Keeping | None:
    """Make the manager's state; None if this manager cannot keep anything."""
    found = _state(manager, installed)
    setattr(manager, _STATE, found)
    installed.managers.append(ref(manager))
    return found


def _state(manager: Any, installed: Installation) -> Keeping | None:
    if manager.mamba_cache_mode != "align":
        return None
    queue = type(getattr(manager.block_pool, "free_block_queue", None))
    if queue.__module__ != _QUEUE_MODULE:
        _logger.warning(
            "vllm-mamba-retire: the free blocks of this pool are in a %s.%s, not in a queue of "
            "vLLM's; no state is kept.",
            queue.__module__,
            queue.__qualname__,
        )
        return None
    beside = (found() for found in installed.managers)
    on_pool = (other for other in beside if other and other.block_pool is manager.block_pool)
    order = next((other._mamba_keeping.order for other in on_pool if other._mamba_keeping), Order())
    return Keeping(manager.block_size, installed.counters, order, installed.patch is PROMPT)


def _give_up(manager: Any, error: Exception) -> None:
    """Stop keeping on this manager: an error here must not stop the scheduler."""
    setattr(manager, _STATE, None)
    _logger.warning(
        "vllm-mamba-retire: keeping the newest state failed and is off from here on (%s: %s); "
        "report this.",
        type(error).__name__,
        error,
    )


def _remove_skipped(manager_class: type, installed: Installation) -> Callable[..., None]:
    remove = replaced(manager_class, installed, REMOVE_SKIPPED)

    def remove_skipped_blocks(
        self: Any,
        request_id: str,
        processed_computed_tokens: int,
        num_prompt_tokens: int | None = None,
    ) -> None:
        try:
            keeping = self._mamba_keeping
        except AttributeError:
            keeping = _start(self, installed)
        # Retirement also frees a state by a rule of its own ("two steps ago"), past
        # `_remove_blocks_in_range`: only around the whole of it is every state seen.
        table = self.req_to_blocks.get(request_id) if keeping else None
        if table is None:
            remove(self, request_id, processed_computed_tokens, num_prompt_tokens)
            return
        found = None
        try:
            found = keeping.note(request_id, table, processed_computed_tokens, num_prompt_tokens)
        except Exception as error:
            _give_up(self, error)
        remove(self, request_id, processed_computed_tokens, num_prompt_tokens)
        if found is None:
            return
        try:
            queue = self.block_pool.free_block_queue
            keeping.refresh(found, processed_computed_tokens, num_prompt_tokens, queue)
        except Exception as error:
            _give_up(self, error)

    return remove_skipped_blocks


def _pop_blocks(manager_class: type, installed: Installation) -> Callable[..., Any]:
    pop = replaced(manager_class, installed, POP_BLOCKS)

    def pop_blocks_for_free(self: Any, request_id: str) -> Any:
        blocks = pop(self, request_id)
        # A manager that was never scheduled has kept nothing.
        keeping = getattr(self, _STATE, None)
        if keeping is None:
            return blocks
        try:
            kept = keeping.take(request_id, self.block_pool.free_block_queue)
        except Exception as error:
            _give_up(self, error)
            return blocks
        # They are freed in reverse order.
        return blocks if kept is None else [kept, *blocks]

    return pop_blocks_for_free


def _patch(name: str) -> Patch:
    return Patch(
        name=name,
        parameters={
            POP_BLOCKS: ("self", "request_id"),
            REMOVE_SKIPPED: (
                *("self", "request_id"),
                *("processed_computed_tokens", "num_prompt_tokens"),
            ),
        },
        methods={POP_BLOCKS: _pop_blocks, REMOVE_SKIPPED: _remove_skipped},
        counters=KeepCounters,
        attributes=(_STATE,),
    )


NEWEST: Final = _patch("keep newest")
PROMPT: Final = _patch("keep newest of the prompt")  # see `Keeping.prompt_only`
PATCHES: Final = (NEWEST, PROMPT)
