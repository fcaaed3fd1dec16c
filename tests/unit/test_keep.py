"""Keeping the newest state by itself: plain lists, and a queue that refuses what vLLM's refuses."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from vllm_mamba_retire.keep import KeepCounters, Keeping, Newest


@dataclass(eq=False)
class State:
    name: str
    block_hash: str | None = None
    ref_cnt: int = 1

    @property
    def is_null(self) -> bool:
        return self.name == "-"


@dataclass
class Queue:
    blocks: list[State] = field(default_factory=list)

    def remove(self, block: Any) -> None:
        self.blocks.remove(block)  # a ValueError where it is not in there, as vLLM's RuntimeError

    def append(self, block: Any) -> None:
        assert block not in self.blocks
        self.blocks.append(block)

    @property
    def fake_free_list_tail(self) -> Any:
        return SimpleNamespace(prev_free_block=self.blocks[-1] if self.blocks else None)

    def __str__(self) -> str:
        return "".join(block.name for block in self.blocks)


NULL = State("-", ref_cnt=0)


@dataclass
class Group:
    """One Mamba group with its queue. In a table written ``"A-b"``, capitals have a hash."""

    queue: Queue = field(default_factory=Queue)
    counters: KeepCounters = field(default_factory=KeepCounters)

    def __post_init__(self) -> None:
        self.keeping = Keeping(1, self.counters)

    def table(self, text: str) -> list[Any]:
        return [
            NULL if name == "-" else State(name, f"hash {name}" if name.isupper() else None)
            for name in text
        ]

    def schedule(
        self, table: list[Any], settled: int, name: str = "r", prompt: int | None = None
    ) -> str:
        """One scheduled step: states before the last settled block are freed in between.

        A block holds one token.
        """
        found = self.keeping.note(name, table, settled, prompt)
        for index in range(min(settled, len(table)) - 1):
            self.free(table, index)
        self.refresh(found, settled, prompt)
        return str(self.queue)

    def refresh(self, found: Newest, settled: int = 9, prompt: int | None = None) -> None:
        self.keeping.refresh(found, settled, prompt, self.queue)

    def free(self, table: list[Any], index: int) -> None:
        if table[index] is not NULL:
            table[index].ref_cnt -= 1
            self.queue.append(table[index])
            table[index] = NULL

    def evict(self) -> State:
        """The next free block gets another owner."""
        block = self.queue.blocks.pop(0)
        block.block_hash, block.ref_cnt = None, 1
        return block

    def pass_by(self, names: str) -> None:
        """Blocks of other prompts are freed."""
        for name in names:
            self.queue.append(State(name, f"hash {name}", ref_cnt=0))


@pytest.fixture
def group() -> Group:
    return Group()


def test_the_newest_state_is_evicted_last_while_scheduled(group: Group) -> None:
    table = group.table("A-B-c")
    assert group.schedule(table, 4) == "AB"
    group.pass_by("XY")
    assert group.schedule(table, 4) == "AXYB"
    assert group.counters.states_refreshed == 2


def test_a_state_without_a_hash_serves_nobody(group: Group) -> None:
    table = group.table("Abcd")
    assert group.schedule(table, 4) == "bcA"


def test_states_that_are_not_settled_are_left_alone(group: Group) -> None:
    table = group.table("AbC")
    assert group.schedule(table, 2) == "A"
    group.pass_by("X")
    assert group.schedule(table, 2) == "XA"


def test_a_state_that_is_still_in_its_table_does_not_move(group: Group) -> None:
    table = group.table("aB")
    group.schedule(table, 2)
    assert str(group.queue) == "a"
    assert group.counters.states_refreshed == 0


def test_a_state_that_gets_its_hash_late_is_found(group: Group) -> None:
    table = group.table("Ab-")
    group.schedule(table, 2)
    table[1].block_hash = "hash b"
    group.pass_by("X")
    assert group.schedule(table, 3) == "AXb"
    assert group.keeping.newest["r"].block.name == "b"


def test_a_block_is_looked_at_once_when_it_is_retired(group: Group) -> None:
    looks: list[int] = []

    class Table(list[Any]):
        def __getitem__(self, place: Any) -> Any:
            looks.append(place)
            return super().__getitem__(place)

    table = Table(group.table("-----ab"))
    group.keeping.note("r", table, 3, None)
    assert looks == [2, 1, 0, 2]
    group.keeping.note("r", table, 3, None)
    group.keeping.note("r", table, 2, None)
    assert looks[4:] == []
    group.keeping.note("r", table, 6, None)
    assert looks[4:] == [5, 4, 3, 5]
    group.keeping.note("r", table, 6, None)
    assert looks[8:] == [5, 5]
    table[5].block_hash = "late"
    group.keeping.note("r", table, 6, None)
    del looks[:]
    group.keeping.note("r", table, 6, None)
    assert looks == []


def test_while_nothing_is_freed_behind_them_states_do_not_move(group: Group) -> None:
    tables = {name: group.table(text) for name, text in (("r", "Ab"), ("s", "Cd"))}
    for _ in range(3):
        for name, table in tables.items():
            group.schedule(table, 2, name)
    assert str(group.queue) == "CA"
    assert group.counters.states_refreshed == 3
    group.pass_by("X")
    assert group.schedule(tables["s"], 2, "s") == "AXC"
    assert group.schedule(tables["r"], 2, "r") == "XCA"
    assert group.schedule(tables["s"], 2, "s") == "XCA"
    group.evict()
    assert group.schedule(tables["r"], 2, "r") == "CA"
    assert group.counters.states_refreshed == 5


def test_states_move_again_after_a_request_has_ended_behind_them(group: Group) -> None:
    tables = {name: group.table(text) for name, text in (("r", "Ab"), ("s", "Cd"))}
    for name, table in (*tables.items(), *tables.items()):
        group.schedule(table, 2, name)
    group.schedule(tables["s"], 2, "s")
    state = group.keeping.take("r", group.queue)
    assert isinstance(state, State)
    group.pass_by("b")
    group.queue.append(state)
    assert str(group.queue) == "CbA"
    assert group.schedule(tables["s"], 2, "s") == "bAC"


def test_a_newer_state_moves_at_once(group: Group) -> None:
    table = group.table("AbCd")
    group.schedule(table, 2)
    assert group.schedule(table, 4) == "AbC"
    group.pass_by("X")
    assert group.schedule(table, 4) == "AbXC"


def test_a_state_that_came_back_from_a_table_moves_again(group: Group) -> None:
    tables = {name: group.table(text) for name, text in (("r", "Ab"), ("s", "Cd"))}
    for name, table in tables.items():
        group.schedule(table, 2, name)
    assert str(group.queue) == "AC"
    state = group.queue.blocks.pop()  # hit and given back, in front of another prompt's block
    group.queue.append(state)
    group.pass_by("X")
    assert group.schedule(tables["r"], 2, "r") == "CXA"
    assert group.schedule(tables["s"], 2, "s") == "XAC"


def test_a_range_past_the_table_ends_with_it(group: Group) -> None:
    table = group.table("aB")
    group.keeping.note("r", table, 9, None)
    assert group.keeping.newest["r"].block is table[1]
    table.append(State("C", "hash C"))
    group.keeping.note("r", table, 9, None)
    assert group.keeping.newest["r"].block is table[2]


def test_rolled_back_tokens_bring_no_older_state_back(group: Group) -> None:
    table = group.table("A-B-c")
    group.schedule(table, 5)
    group.pass_by("X")
    assert group.schedule(table, 1) == "AXB"


def test_a_reused_block_is_not_moved_as_the_old_state(group: Group) -> None:
    table = group.table("Ab")
    assert group.schedule(table, 2) == "A"
    block = group.evict()
    block.block_hash, block.ref_cnt = "hash of another prompt", 0
    group.queue.append(block)
    group.pass_by("X")
    assert group.schedule(table, 2) == "AX"
    assert group.keeping.take("r", group.queue) is None
    assert str(group.queue) == "AX"
    assert group.counters == KeepCounters(states_refreshed=1, states_still_there=0)


def test_a_state_that_another_request_uses_is_not_in_the_queue(group: Group) -> None:
    table = group.table("Ab")
    group.schedule(table, 2)
    state = group.queue.blocks.pop()
    state.ref_cnt = 1  # hit by another prompt
    group.schedule(table, 2)
    assert group.keeping.take("r", group.queue) is None
    assert (state.ref_cnt, str(group.queue)) == (1, "")
    assert group.counters == KeepCounters(states_refreshed=1, states_still_there=1)


def test_the_state_goes_back_with_the_blocks_of_its_request(group: Group) -> None:
    table = group.table("Ab")
    group.schedule(table, 2)
    state = group.queue.blocks[0]
    group.pass_by("X")
    assert group.keeping.take("r", group.queue) is state
    assert (state.ref_cnt, str(group.queue)) == (1, "X")
    assert group.counters.states_still_there == 1
    assert not group.keeping.newest


def test_a_request_without_a_state_ends(group: Group) -> None:
    assert group.keeping.take("r", group.queue) is None
    group.refresh(group.keeping.note("r", group.table("ab"), 2, None))
    assert group.keeping.take("r", group.queue) is None
    assert group.counters == KeepCounters()


def test_a_table_that_was_replaced_starts_again(group: Group) -> None:
    group.schedule(group.table("A-b"), 3)
    group.pass_by("X")
    table = group.table("C-")
    group.keeping.note("r", table, 1, None)
    assert group.keeping.newest["r"].block is table[0]
    group.refresh(group.keeping.note("r", group.table("d"), 0, None))
    assert str(group.queue) == "AX"


def test_two_requests_may_share_a_state(group: Group) -> None:
    one = group.table("Ab")
    shared = one[0]
    other = [shared, State("c")]
    shared.ref_cnt = 2
    first = group.keeping.note("one", one, 2, None)
    second = group.keeping.note("other", other, 2, None)
    shared.ref_cnt, one[0], other[0] = 0, NULL, NULL
    group.queue.append(shared)
    group.pass_by("X")
    group.refresh(first)
    group.refresh(second)
    assert str(group.queue) == "XA"
    assert group.keeping.take("one", group.queue) is shared
    group.refresh(second)  # held until it is freed
    assert group.keeping.take("other", group.queue) is None
    assert (shared.ref_cnt, str(group.queue)) == (1, "X")


def test_nothing_moves_before_the_prompt_is_computed(group: Group) -> None:
    table = group.table("A-b")
    assert group.schedule(table, 2, prompt=3) == "A"
    group.pass_by("X")
    assert group.schedule(table, 2, prompt=3) == "AX"
    assert group.schedule(table, 3, prompt=3) == "XA"


@pytest.mark.parametrize("prompt_only", [False, True])
def test_an_empty_table_or_an_unknown_prompt_is_no_error(group: Group, prompt_only: bool) -> None:
    group.keeping.prompt_only = prompt_only
    assert group.keeping.note("r", [], 9, None).block is None
    assert group.schedule(group.table("Ab"), 2) == "A"


def test_states_of_the_answer_may_be_left_out(group: Group) -> None:
    """Chat templates drop the reasoning from the history: what follows it is never hit."""
    group.keeping.prompt_only = True
    table = group.table("AbC-d")
    assert group.schedule(table, 5, prompt=2) == "bCA"
    group.keeping.prompt_only = False
    table = group.table("EfG-h")
    assert group.schedule(table, 5, "s", prompt=2) == "bCAEfG"


def test_blocks_hold_several_tokens(group: Group) -> None:
    group.keeping.block = 4
    table = group.table("AB")
    group.keeping.note("r", table, 7, None)
    assert group.keeping.newest["r"].block is table[0]
    group.keeping.note("r", table, 8, None)
    assert group.keeping.newest["r"].block is table[1]


def test_counters_can_start_from_zero() -> None:
    counters = KeepCounters(1, 2)
    counters.reset()
    assert counters == KeepCounters(0, 0)


class Requests(RuleBasedStateMachine):
    """Two requests compute, are freed and end on one queue, while other prompts take blocks.

    Model: per request the last state with a hash that was settled, forgotten when its block is
    taken by somebody else.
    """

    NAMES = ("r", "s")

    def __init__(self) -> None:
        super().__init__()
        self.group = Group()
        self.all: list[State] = []
        self.tables: dict[str, list[Any]] = {}
        self.expected: dict[str, State | None] = {}
        self.settled: dict[str, int] = {}
        self.taken: list[State] = []

    @rule(name=st.sampled_from(NAMES), text=st.text("Aa-", min_size=1, max_size=6))
    def grow(self, name: str, text: str) -> None:
        new = self.group.table(text)
        self.all += [block for block in new if block is not NULL]
        self.tables.setdefault(name, []).extend(new)

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), more=st.integers(0, 6))
    def schedule(self, data: st.DataObject, more: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.tables)))
        table = self.tables[name]
        settled = self.settled[name] = min(self.settled.get(name, 0) + more, len(table))
        hashed = [block for block in table[:settled] if block.block_hash is not None]
        self.expected[name] = hashed[-1] if hashed else self.expected.get(name)
        self.group.schedule(table, settled, name)
        last = self.expected[name]
        if last is not None and last.ref_cnt == 0:
            queue = self.group.queue.blocks
            behind = queue[queue.index(last) + 1 :]
            assert all(block in self.expected.values() for block in behind)

    @rule()
    def evict(self) -> None:
        if self.group.queue.blocks:
            block = self.group.evict()
            self.taken.append(block)
            for name, state in self.expected.items():
                if state is block:
                    self.expected[name] = None

    @rule()
    def others_free(self) -> None:
        if self.taken:
            block = self.taken.pop()
            block.block_hash, block.ref_cnt = f"other {id(block)}", 0
            self.group.queue.append(block)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.tables)))
        table, state = self.tables.pop(name), self.expected.pop(name, None)
        self.settled.pop(name, None)
        taken = self.group.keeping.take(name, self.group.queue)
        free = state is not None and state not in table
        assert taken is (state if free else None)
        for block in [*reversed([b for b in table if b is not NULL]), *([taken] if taken else [])]:
            block.ref_cnt -= 1
            self.group.queue.append(block)
        if taken:
            assert self.group.queue.blocks[-1] is taken

    @invariant()
    def every_block_is_free_once_or_held(self) -> None:
        held = {id(block) for table in self.tables.values() for block in table}
        held |= {id(block) for block in self.taken}
        free = [id(block) for block in self.group.queue.blocks]
        assert len(free) == len(set(free))
        for block in self.all:
            assert (id(block) in held) != (id(block) in free)
            assert block.ref_cnt == (id(block) in held)


TestRequests = Requests.TestCase
TestRequests.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
