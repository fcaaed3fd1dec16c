"""Properties of the retirement by itself: any table, any calls, against a model that is obvious.

The model keeps, per request, which places of the table were covered by a range so far. A state is
freed exactly when its place is first covered, and nothing else ever happens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from vllm_mamba_retire.retirement import Counters, Retirement

REQUESTS = ("a", "b")
LONGEST = 12  # blocks of a table


@dataclass(eq=False)
class State:
    is_null: bool = False


NULL = State(is_null=True)


class Table(list[Any]):
    """Counts how often each place is looked at."""

    def __init__(self, states: list[bool]) -> None:
        super().__init__(State() if state else NULL for state in states)
        self.looks: dict[int, int] = {}

    def __getitem__(self, place: Any) -> Any:
        self.looks[place] = self.looks.get(place, 0) + 1
        return super().__getitem__(place)


@dataclass
class Pool:
    freed: list[State] = field(default_factory=list)
    calls: int = 0

    def free_blocks(self, ordered_blocks: Any) -> None:
        assert ordered_blocks, "called for nothing"
        self.freed.extend(ordered_blocks)
        self.calls += 1


class Requests(RuleBasedStateMachine):
    """Requests get tables, grow, are retired and end, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.counters = Pool(), Counters()
        self.state = Retirement(NULL, self.counters)
        self.tables: dict[str, Table] = {}
        self.covered: dict[str, int] = {}  # model: places below this are retired
        self.expected: list[State] = []  # model: what must have been freed, in order

    @rule(name=st.sampled_from(REQUESTS), states=st.lists(st.booleans(), max_size=LONGEST))
    def give_table(self, name: str, states: list[bool]) -> None:
        """Also in place of one that never was popped."""
        self.tables[name] = Table(states)
        self.covered[name] = 0

    @rule(name=st.sampled_from(REQUESTS), states=st.lists(st.booleans(), max_size=4))
    def grow(self, name: str, states: list[bool]) -> None:
        if name in self.tables:
            self.tables[name].extend(State() if state else NULL for state in states)

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), last=st.integers(-1, LONGEST + 2))
    def retire(self, data: st.DataObject, last: int) -> None:
        """Ranges start at the first block, as vLLM's do."""
        name = data.draw(st.sampled_from(sorted(self.tables)))
        table = self.tables[name]
        end = min(last, len(table))
        places = range(end - 1, self.covered[name] - 1, -1)
        states = list(table)
        self.expected += [states[place] for place in places if states[place] is not NULL]
        self.covered[name] = max(self.covered[name], end)
        for _ in range(2):  # the second call must change nothing
            self.state.retire(name, table, 0, last, self.pool)

    @rule(name=st.sampled_from(REQUESTS))
    def end(self, name: str) -> None:
        self.state.forget(name)
        self.tables.pop(name, None)
        assert name not in self.state.watermarks
        assert name not in self.state.tables

    @invariant()
    def freed_exactly_once_in_order(self) -> None:
        assert self.pool.freed == self.expected
        assert self.counters.states_freed == len(self.expected)

    @invariant()
    def covered_places_are_null_and_the_others_untouched(self) -> None:
        for name, table in self.tables.items():
            states = list(table)
            assert all(state is NULL for state in states[: self.covered[name]])
            assert not set(states[self.covered[name] :]) & set(self.expected)

    @invariant()
    def no_place_is_looked_at_twice(self) -> None:
        assert all(looks == 1 for table in self.tables.values() for looks in table.looks.values())


TestRequests = Requests.TestCase
TestRequests.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


def test_counters_can_start_from_zero() -> None:
    counters = Counters(1, 2, 3, 4)
    counters.reset()
    assert counters == Counters(0, 0, 0, 0)


def test_a_range_to_the_very_end_of_the_table_is_not_clamped() -> None:
    counters, table = Counters(), Table([True, True])
    Retirement(NULL, counters).retire("r", table, 0, 2, Pool())
    assert (counters.states_freed, counters.ranges_clamped) == (2, 0)
