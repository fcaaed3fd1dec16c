"""What must hold of a manager, said without the code under test.

Looks at block tables, reference counts and the free queue from outside before and after an
operation. It knows how many tokens of a request are settled and nothing of how blocks are retired.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from tools.proof.traffic import Client, Traffic


class BrokenError(AssertionError):
    """A property does not hold."""


class Oracle:
    """Holds one world to its properties; `visits` and `bound` leave out one of them."""

    def __init__(self, world: Traffic, *, visits: bool = True, bound: bool = True) -> None:
        self.world = world
        self.visits = [_count_visits(manager) for manager in world.mamba if visits]
        self.bound = bound
        self.before = self._look()

    def check(self, operation: str) -> None:
        """Hold the world to its properties after an operation."""
        after = self._look()
        self._check_references()
        for name, client in self.world.running.items():
            self._check_live_set(name, client, after)
        if self.bound and operation in ("chunk", "admit", "resume"):
            self._check_bound()
        if operation == "retire":
            self._check_attention(after)
        self._check_visits()
        self.before = after

    def check_end(self) -> None:
        """Nothing is left when every request has ended."""
        world = self.world
        world.finish_all()
        _must(world.pool.get_num_free_blocks() == world.geometry.pool - 1, "pool not whole")
        for manager in world.mamba:
            _must(not any(manager.req_to_blocks.values()), "a table is left")
            _must(not getattr(manager, "_num_retired_blocks", {}), "a watermark is left")
            state = getattr(manager, "_mamba_retirement", None)
            _must(not (state and state.tables), "a table is still referred to")

    def _look(self) -> list[dict[str, list[Any]]]:
        managers = self.world.managers
        return [{name: list(t) for name, t in m.req_to_blocks.items()} for m in managers]

    def _check_references(self) -> None:
        """References equal holders; free blocks are those without a holder, each once."""
        world = self.world
        holders: Counter[int] = Counter()
        for manager in world.managers:
            for table in manager.req_to_blocks.values():
                holders.update(block.block_id for block in table)
            for pair in manager._pending_cow_copies:
                holders.update(block.block_id for block in pair)
        for popped in world.popped:
            holders.update(block.block_id for block in popped)
        free = [block.block_id for block in world.pool.free_block_queue.get_all_free_blocks()]
        _must(len(set(free)) == len(free), "a block is free twice")
        for block in world.pool.blocks[1:]:
            held = holders[block.block_id]
            _must(block.ref_cnt == held, f"block {block.block_id}: {block.ref_cnt} != {held}")
            _must((held == 0) == (block.block_id in free), f"block {block.block_id}: free and held")

    def _check_live_set(self, name: str, client: Client, after: list[dict[str, list[Any]]]) -> None:
        """States that a step to come or in flight may read did not leave the table.

        The next step reads the state of the last settled token; steps in flight read theirs and
        later ones. So no state at or above the block of the last settled token may go, unless it
        was moved up (scratch for drafts) or copied (a partial hit).
        """
        last_settled = (client.processed - 1) // self.world.geometry.block
        for group in range(self.world.geometry.groups):
            now = after[group].get(name, [])
            for index, block in enumerate(self.before[group].get(name, [])):
                if block.is_null or index < last_settled or index >= len(now):
                    continue
                _must(
                    not now[index].is_null or block in now[index:],
                    f"group {group}: live block {index} of {name} was retired",
                )

    def _check_bound(self) -> None:
        """Live states <= drafts + 2 + lag, where the lag is the steps in flight before this one."""
        world = self.world
        for name, client in world.running.items():
            lag = max(0, len(client.in_flight) - 1)
            if not client.in_flight or not self._retired_to_date(name):
                continue
            for manager in world.mamba:
                live = sum(not block.is_null for block in manager.req_to_blocks[name])
                _must(live <= world.geometry.spec + 2 + lag, f"{name} holds {live} states")

    def _retired_to_date(self, name: str) -> bool:
        """Whether the operation was an allocation of this request, which retires first."""
        tables = [manager.req_to_blocks.get(name, []) for manager in self.world.managers]
        return [list(t) for t in tables] != [group.get(name, []) for group in self.before]

    def _check_attention(self, after: list[dict[str, list[Any]]]) -> None:
        _must(after[-1] == self.before[-1], "a block of the attention group was touched")

    def _check_visits(self) -> None:
        for visits in self.visits:
            most = max(visits.values(), default=0)
            _must(most <= 1, f"a block was visited {most} times by retirement")


def _must(holds: bool, otherwise: str) -> None:
    if not holds:
        raise BrokenError(otherwise)


class _WatchedTable(list[Any]):
    """A block table that notes which places are read."""

    def __init__(self) -> None:
        super().__init__()
        self.read: set[int] = set()

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, int):
            self.read.add(place)
        return super().__getitem__(place)


def _count_visits(manager: Any) -> Counter[tuple[int, int]]:
    """Count the calls of retirement that read a place of a table, by table and place."""
    visits: Counter[tuple[int, int]] = Counter()
    tables: list[_WatchedTable] = []
    remove = manager._remove_blocks_in_range

    def new_table() -> _WatchedTable:
        tables.append(_WatchedTable())
        return tables[-1]

    def watched(request_id: str, *args: Any) -> None:
        table = manager.req_to_blocks.get(request_id)
        if not isinstance(table, _WatchedTable):
            remove(request_id, *args)
            return
        table.read.clear()
        remove(request_id, *args)
        # All tables are kept, so their places in the list name them.
        number = next(n for n, known in enumerate(tables) if known is table)
        visits.update((number, place) for place in table.read)

    manager.req_to_blocks.default_factory = new_table
    manager._remove_blocks_in_range = watched
    return visits
