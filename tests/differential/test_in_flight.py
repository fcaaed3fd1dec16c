"""Blocks freed while a step in flight names them, counted on a release's own scheduler.

Retirement frees none. That is what makes it safe beside a connector: a release keeps the blocks of
a request that leaves until its steps are settled, but what retirement frees is free at once. With a
connector, 0.26.0 itself schedules steps without a state and frees some under them; there the fix
may do so as often as stock vLLM.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tools.proof.in_flight import Counts, count
from tools.proof.wrong_fixes import package_with
from tools.table import rows as table

SEEDS = 40


@pytest.fixture(scope="module")
def tree(trees: Path, release: str) -> Path:
    return trees / release


@pytest.fixture(scope="module")
def fixed(tree: Path) -> Counts:
    return count(tree, "fixed", SEEDS)


def test_retirement_frees_no_state_that_a_step_in_flight_names(
    fixed: Counts, tree: Path, release: str
) -> None:
    stock = count(tree, "stock", SEEDS) if release == "0.26.0" else {}
    for traffic, counts in fixed.items():
        assert counts["steps"] > 500, traffic
        assert min(counts[what] for what in ("aborted", "resets", "appended")) > 0, traffic
        for what in ("freed: retired", "reads of a null block"):
            assert counts.get(what, 0) <= stock.get(traffic, {}).get(what, 0), (traffic, what)
    assert fixed["alone"]["freed: request ended"] > 0


def test_no_block_goes_to_a_load_while_a_step_in_flight_names_it(fixed: Counts) -> None:
    counts = fixed["connected"]
    assert min(counts["loaded"], counts["saved"]) > 10
    assert [what for what in counts if what.startswith("load gets")] == []
    assert counts["offers lost"] == 0


def test_the_method_of_the_native_release_frees_the_same(
    fixed: Counts, trees: Path, tree: Path
) -> None:
    assert count(tree, str(trees / table.versions("native")[0]), SEEDS) == fixed


def test_a_state_too_many_is_counted_and_gets_into_a_load(tree: Path, tmp_path: Path) -> None:
    mutant = package_with("frees one block too many", tmp_path)
    counts = count(tree, "fixed", SEEDS, path=[mutant])
    assert counts["alone"]["freed: retired"] > 0
    assert counts["alone"]["step gets: retired"] > 0
    assert counts["connected"]["load gets: retired"] > 0
