"""The retirement by itself, on a plain list and a pool that only takes notes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from vllm_mamba_retire.retirement import Block, Counters, Retirement


@dataclass(eq=False)
class State:
    name: str
    is_null: bool = False


@dataclass
class Pool:
    returned: list[list[str]] = field(default_factory=list)

    def free_blocks(self, ordered_blocks: Sequence[Block]) -> None:
        self.returned.append([block.name for block in ordered_blocks])  # type: ignore[attr-defined]


NULL = State("-", is_null=True)


@dataclass
class Bench:
    """One pool and one state, and tables written as strings: ``"a-bc"``."""

    pool: Pool = field(default_factory=Pool)
    retirement: Retirement = field(default_factory=lambda: Retirement(NULL, Counters()))

    def table(self, text: str) -> list[Block]:
        return [NULL if name == "-" else State(name) for name in text]

    def retire(
        self, table: list[Block], first: int, last: int, stock_frees: int | None = None
    ) -> str:
        self.retirement.retire("r", table, first, last, self.pool, stock_frees=stock_frees)
        return "".join(block.name for block in table)  # type: ignore[attr-defined]


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_gaps_are_skipped_and_the_last_state_is_freed_first(bench: Bench) -> None:
    assert bench.retire(bench.table("a-b-c"), 0, 4) == "----c"
    assert bench.pool.returned == [["b", "a"]]


def test_end_of_the_range_is_not_included(bench: Bench) -> None:
    assert bench.retire(bench.table("ab"), 0, 1) == "-b"


def test_start_of_the_range_is_respected(bench: Bench) -> None:
    assert bench.retire(bench.table("abc"), 1, 2) == "a-c"


def test_retired_blocks_are_not_visited_again(bench: Bench) -> None:
    table = bench.table("ab-c")
    bench.retire(table, 0, 2)
    # If the walk came back it would free this one.
    table[0] = State("late")
    assert bench.retire(table, 0, 3)[-1] == "c"
    assert bench.pool.returned == [["b", "a"]]


def test_watermark_never_moves_down(bench: Bench) -> None:
    table = bench.table("abc")
    bench.retire(table, 0, 3)
    bench.retire(table, 0, 1)
    assert bench.retirement.watermarks == {"r": 3}


def test_watermark_moves_over_blocks_that_were_null_already(bench: Bench) -> None:
    bench.retire(bench.table("---a"), 0, 3)
    assert bench.retirement.watermarks == {"r": 3}
    assert bench.pool.returned == []


def test_watermark_belongs_to_its_table(bench: Bench) -> None:
    bench.retire(bench.table("ab"), 0, 2)
    assert bench.retire(bench.table("cd"), 0, 2) == "--"


def test_forgotten_request_starts_again(bench: Bench) -> None:
    table = bench.table("ab")
    bench.retire(table, 0, 2)
    bench.retirement.forget("r")
    assert (bench.retirement.watermarks, bench.retirement.tables) == ({}, {})
    table[0] = State("again")
    assert bench.retire(table, 0, 2) == "--"


def test_range_from_before_the_table_starts_with_the_table(bench: Bench) -> None:
    assert bench.retire(bench.table("a-bc"), -1, 3) == "---c"


def test_range_past_the_table_is_cut_and_counted(bench: Bench) -> None:
    table = bench.table("ab")
    assert bench.retire(table, 0, 9) == "--"
    assert bench.retirement.watermarks == {"r": 2}
    assert bench.retirement.counters.ranges_clamped == 1
    table.append(State("c"))
    assert bench.retire(table, 0, 3) == "---"


@pytest.mark.parametrize(("first", "last"), [(0, 0), (2, 2), (2, 1), (0, -1)])
def test_empty_range_leaves_no_trace(first: int, last: int, bench: Bench) -> None:
    assert bench.retire(bench.table("abc"), first, last) == "abc"
    assert bench.retirement.watermarks == {}
    assert bench.pool.returned == []


@pytest.mark.parametrize(
    ("text", "stock_frees", "kept"),
    [
        ("abc", None, 0),  # no gap: stock frees them all
        ("a-b", None, 1),
        ("ab-c", None, 2),
        ("ab--", None, 2),  # stock meets the gap at once
        ("a-b-c", None, 2),
        ("a-b", 0, 0),  # vLLM's own rule frees block 0 in the same call
    ],
)
def test_states_that_stock_would_keep(
    text: str, stock_frees: int | None, kept: int, bench: Bench
) -> None:
    bench.retire(bench.table(text), 0, len(text), stock_frees)
    assert bench.retirement.counters.states_stock_would_keep == kept
    assert bench.retirement.counters.states_freed == len(text.replace("-", ""))
    assert bench.retirement.counters.calls == 1
