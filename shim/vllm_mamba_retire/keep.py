"""Keeps the newest cached state of each running request last in the free queue.

A retired state stays in the free queue with its hash and serves prefix-cache hits until its block
is taken. It enters the queue when it is retired, long before the attention blocks of the same
prompt, so under load it is evicted first, and attention blocks without a state are no hit. Here a
request's newest cached state counts as just used each time the request is scheduled once its prompt
is computed, and goes back with the request's own blocks when it ends. Nothing refers to it
meanwhile, so no block leaves the pool.

This module uses a block table, the pool's free queue and one dictionary; it must not depend on
vLLM, releases or its callers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


class CachedBlock(Protocol):
    """The attributes of a KV-cache block that keeping uses.

    Attributes:
        ref_cnt: number of tables that refer to it; at 0 the block is in the free queue.
    """

    ref_cnt: int

    @property
    def is_null(self) -> bool:
        """Whether it is the null block."""

    @property
    def block_hash(self) -> object | None:
        """Key of its cache entry; None without one. The null block has none."""


class FreeQueue(Protocol):
    """The methods of the pool's free queue that keeping uses; its first block is evicted first."""

    @property
    def fake_free_list_tail(self) -> Any:
        """The end mark of the queue; its ``prev_free_block`` is the last block."""

    def remove(self, block: CachedBlock) -> None:
        """Remove a block from any position."""

    def append(self, block: CachedBlock) -> None:
        """Put a block at the end."""


@dataclass(slots=True)
class KeepCounters:
    """Counters of keeping in this process since it was installed.

    Attributes:
        states_refreshed: times that a state was moved to the end of the free queue.
        states_still_there: states that were still cached when their request ended.
    """

    states_refreshed: int = 0
    states_still_there: int = 0

    def reset(self) -> None:
        """Start again from zero."""
        self.states_refreshed = self.states_still_there = 0


@dataclass(slots=True)
class Newest:
    """The newest cached state of one request.

    Attributes:
        table: the block table it was found in.
        next_look: settled tokens from which on the table may hold a newer state.
        looked_at: leading blocks of the table that need no second look.
        block: the block that holds the state; None before one is found.
        block_hash: its hash when it was found. With another hash it holds another state.
        turn: `Order.turn` when it was moved.
    """

    table: Sequence[CachedBlock]
    next_look: int
    looked_at: int = 0
    block: CachedBlock | None = None
    block_hash: object | None = None
    turn: int = -1


@dataclass(slots=True)
class Order:
    """The end of the free queue as the last call left it.

    While nothing else is freed, the states of the running requests stay the last ones, and moving
    each of them again would change nothing.

    Attributes:
        last: the block that was moved last.
        turn: number that changes when another block is found behind `last`.
    """

    last: CachedBlock | None = None
    turn: int = 0


@dataclass(slots=True)
class Keeping:
    """The state of one manager (one Mamba group) between calls.

    Attributes:
        block: block size, in tokens.
        counters: added to; shared by the managers of a process.
        order: of the free queue; shared by the managers that use it.
        prompt_only: keep the newest state of the prompt, though the answer has newer ones.
        newest: request id -> its newest cached state.
    """

    block: int
    counters: KeepCounters
    order: Order = field(default_factory=Order)
    prompt_only: bool = False
    newest: dict[str, Newest] = field(default_factory=dict)

    def note(
        self, request_id: str, table: Sequence[CachedBlock], settled: int, prompt: int | None
    ) -> Newest:
        """Look for a newer state in a request's table, before its states are retired.

        Args:
            request_id: whose table it is.
            table: its block table.
            settled: tokens that are computed and settled.
            prompt: tokens of its prompt, if known.

        Returns:
            The request's newest state, for `refresh`.
        """
        found = self.newest.get(request_id)
        # A table that was replaced without passing through `take` is another one's.
        if found is None or found.table is not table:
            found = self.newest[request_id] = Newest(table, self.block)
        if self.prompt_only and prompt is not None:
            settled = min(settled, prompt)
        if settled < found.next_look or not table:
            return found
        end = min(settled // self.block, len(table))
        for index in range(end - 1, found.looked_at - 1, -1):
            block = table[index]
            if block.block_hash is not None:
                found.block, found.block_hash, found.turn = block, block.block_hash, -1
                break
        # The last block is not retired yet if the tokens end with it; it may get its hash later.
        last = table[end - 1]
        certain = last.is_null or last.block_hash is not None
        found.looked_at = max(found.looked_at, end if certain else end - 1)
        found.next_look = (found.looked_at + 1) * self.block
        return found

    def refresh(self, found: Newest, settled: int, prompt: int | None, queue: FreeQueue) -> None:
        """Move a request's newest state to the end of the free queue, if it is in the queue.

        Nothing is moved while the prompt is computed: each chunk leaves a newer state in the queue,
        and moving the older ones again cost hits of other requests when it was measured.
        """
        if prompt is not None and settled < prompt:
            return
        order = self.order
        if queue.fake_free_list_tail.prev_free_block is not order.last:
            order.turn += 1
        elif found.turn == order.turn:
            return
        block = self._still_cached(found)
        if block is not None and block.ref_cnt == 0:
            queue.remove(block)
            queue.append(block)
            self.counters.states_refreshed += 1
            order.last, found.turn = block, order.turn

    def take(self, request_id: str, queue: FreeQueue) -> CachedBlock | None:
        """End a request: take its newest state out of the free queue, referred to once.

        Returns:
            The block, to be freed after the request's other blocks; None if the state was evicted
            or a table still refers to it.
        """
        block = self._still_cached(self.newest.pop(request_id, None))
        if block is None:
            return None
        self.counters.states_still_there += 1
        if block.ref_cnt:
            return None
        queue.remove(block)
        block.ref_cnt = 1
        self.order.last = None  # it may be freed as the last one again, behind others
        return block

    def _still_cached(self, found: Newest | None) -> CachedBlock | None:
        if found is None or found.block is None or found.block.block_hash != found.block_hash:
            return None
        return found.block
