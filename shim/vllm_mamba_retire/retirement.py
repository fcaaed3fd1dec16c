"""Retires Mamba states across null gaps and visits each block once.

Rule and bounds come from vllm#55450 (first in vLLM 0.30.0). This module uses a block table, a pool
and two dictionaries; it must not depend on vLLM, releases or its callers.

A prefill chunk that spans two or more blocks leaves null blocks between live states. A walk that
goes backward and stops at the first null block never reaches the states before the gap. Here nulls
are skipped, and a watermark per request keeps the walk from visiting a block twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol


class Block(Protocol):
    """The attributes of a KV-cache block that retirement uses."""

    is_null: bool


class BlockPool(Protocol):
    """The methods of the block pool that retirement uses."""

    def free_blocks(self, ordered_blocks: Sequence[Block]) -> None:
        """Free blocks; the first one is evicted first."""


@dataclass(slots=True)
class Counters:
    """Counters of retirement in this process since it was installed.

    Attributes:
        calls: ranges passed to `Retirement.retire` (align mode only).
        states_freed: states returned to the pool before their request ended.
        states_stock_would_keep: those of them that lie before a null gap, where the walk of
            0.26.0-0.29.0 stops.
        ranges_clamped: ranges that reached past the end of the block table.
    """

    calls: int = 0
    states_freed: int = 0
    states_stock_would_keep: int = 0
    ranges_clamped: int = 0

    def reset(self) -> None:
        """Start again from zero."""
        self.calls = self.states_freed = 0
        self.states_stock_would_keep = self.ranges_clamped = 0


@dataclass(slots=True)
class Retirement:
    """The state of one manager between calls: a watermark per request, and its table.

    vLLM 0.30.0 keeps the watermark alone. If a table is replaced without `pop_blocks_for_free`, the
    new table inherits the old watermark and its first states are never retired. Here the watermark
    belongs to the list object, so a new table starts at 0.

    Attributes:
        null_block: the entry of a table where no state is kept.
        counters: added to; shared by the managers of a process.
        watermarks: request id -> leading blocks of its table that are retired; the dictionary that
            vLLM calls `_num_retired_blocks`.
        tables: request id -> the list that the watermark was taken on.
    """

    null_block: Block
    counters: Counters
    watermarks: dict[str, int] = field(default_factory=dict)
    tables: dict[str, list[Block]] = field(default_factory=dict)

    def retire(
        self,
        request_id: str,
        table: list[Block],
        first_block: int,
        last_block: int,
        pool: BlockPool,
        *,
        stock_frees: int | None = None,
    ) -> None:
        """Free the states in blocks ``[first_block, last_block)`` of a request's table.

        Freed blocks are replaced by the null block and passed to `pool` in one call, last block
        first. The watermark moves up to the end of the range.

        Args:
            request_id: whose table it is.
            table: the request's block table, changed in place.
            first_block: first block of the range; raised to the request's watermark.
            last_block: end of the range, not included; lowered to the length of the table.
            pool: takes the freed blocks.
            stock_frees: index of the block that vLLM itself frees in the same call (its "state of
                two steps ago"), if any; it does not count as kept by stock.
        """
        counters = self.counters
        counters.calls += 1
        if last_block > len(table):
            counters.ranges_clamped += 1
            last_block = len(table)
        same = self.tables.get(request_id) is table
        # Never below 0: index -1 is the newest state.
        first_block = max(first_block, self.watermarks.get(request_id, 0) if same else 0)
        if first_block >= last_block:
            return
        null_block = self.null_block
        freed: list[Block] = []
        crossed_gap = False
        for index in range(last_block - 1, first_block - 1, -1):
            block = table[index]
            if block.is_null:
                crossed_gap = True
                continue
            table[index] = null_block
            freed.append(block)
            if crossed_gap and index != stock_frees:
                counters.states_stock_would_keep += 1
        self.tables[request_id] = table
        self.watermarks[request_id] = last_block
        if freed:
            counters.states_freed += len(freed)
            pool.free_blocks(freed)

    def forget(self, request_id: str) -> None:
        """Drop the watermark and the table of a request."""
        self.tables.pop(request_id, None)
        self.watermarks.pop(request_id, None)
