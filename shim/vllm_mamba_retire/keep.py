"""Keeps the newest cached state of each running request last in the free queue.

A retired state stays in the free queue with its hash and serves prefix-cache hits until its block
is taken. It enters the queue when it is retired, long before the attention blocks of the same
prompt, so under load it is evicted first, and attention blocks without a state are no hit. Here a
request's newest cached state counts as just used each time the request is scheduled once its prompt
is computed, and goes back with the request's own blocks when it ends. Nothing refers to it
meanwhile, so no block leaves the pool.

This module knows a block table, the pool's free queue and one dictionary; it must not know vLLM,
releases or how it is called.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol


class Block(Protocol):
    """What is needed of a KV-cache block.

    Attributes:
        ref_cnt: tables that refer to it; a block without any is in the free queue.
    """

    ref_cnt: int

    @property
    def block_hash(self) -> object | None:
        """Key of its cache entry; None without one. The null block has none."""


class FreeQueue(Protocol):
    """What is needed of the pool's queue of free blocks; its first block is evicted first."""

    def remove(self, block: Block) -> None:
        """Take a block out, wherever it is."""

    def append(self, block: Block) -> None:
        """Put a block at the end."""


@dataclass(slots=True)
class KeepCounters:
    """What keeping did in this process since it was installed.

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
        looked_at: leading blocks of the table that need no second look.
        block: the block that holds the state; None before one is found.
        block_hash: its hash when it was found. With another hash it holds another state.
    """

    table: Sequence[Block]
    looked_at: int = 0
    block: Block | None = None
    block_hash: object | None = None


@dataclass(slots=True)
class Keeping:
    """What one manager (one Mamba group) remembers between calls.

    Attributes:
        block: block size, in tokens.
        counters: added to; shared by the managers of a process.
        prompt_only: keep the newest state of the prompt, though the answer has newer ones.
        newest: request id -> its newest cached state.
    """

    block: int
    counters: KeepCounters
    prompt_only: bool = False
    newest: dict[str, Newest] = field(default_factory=dict)

    def note(
        self, request_id: str, table: Sequence[Block], settled: int, prompt: int | None
    ) -> None:
        """Look for a newer state in a request's table, before its states are retired.

        Args:
            request_id: whose table it is.
            table: its block table.
            settled: tokens that are computed and settled.
            prompt: tokens of its prompt, if known.
        """
        found = self.newest.get(request_id)
        # A table that was replaced without passing through `take` is another one's.
        if found is None or found.table is not table:
            found = self.newest[request_id] = Newest(table)
        if self.prompt_only and prompt is not None:
            settled = min(settled, prompt)
        end = min(settled // self.block, len(table))
        for index in range(end - 1, found.looked_at - 1, -1):
            block = table[index]
            if block.block_hash is not None:
                found.block, found.block_hash = block, block.block_hash
                break
        # The last block is not retired yet if the tokens end with it; it may get its hash later.
        found.looked_at = max(found.looked_at, end - 1)

    def refresh(self, request_id: str, settled: int, prompt: int | None, queue: FreeQueue) -> None:
        """Move a request's newest state to the end of the free queue, if it is in there.

        While the prompt is computed each chunk leaves a newer state there, and moving the older
        ones again was measured to cost hits of other requests.
        """
        if prompt is not None and settled < prompt:
            return
        block = self._still_cached(self.newest.get(request_id))
        if block is not None and block.ref_cnt == 0:
            queue.remove(block)
            queue.append(block)
            self.counters.states_refreshed += 1

    def take(self, request_id: str, queue: FreeQueue) -> Block | None:
        """End a request: take its newest state out of the free queue, referred to once.

        Returns:
            The block, to be freed with the request's other blocks and after them; None where the
            state is gone or a table still refers to it.
        """
        block = self._still_cached(self.newest.pop(request_id, None))
        if block is None:
            return None
        self.counters.states_still_there += 1
        if block.ref_cnt:
            return None
        queue.remove(block)
        block.ref_cnt = 1
        return block

    def _still_cached(self, found: Newest | None) -> Block | None:
        if found is None or found.block is None or found.block.block_hash != found.block_hash:
            return None
        return found.block
