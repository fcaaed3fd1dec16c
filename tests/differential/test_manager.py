"""A patched live release against 0.30.0, operation by operation, on the KV-cache manager.

Equal after every operation: what the manager answered, block tables, reference counts, order of
the free queue, block hashes. Against 0.30.0 itself where the two releases' other code agrees;
against 0.30.0's method on the release's own code everywhere (see `tools.proof.sequences.geometry`).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tools.proof.compare import Tally, Variant, compare, first_difference, runners, shrink
from tools.proof.sequences import Scope, Sequence, seeded

LENGTH = 200  # operations of a sequence
REGRESSIONS = Path(__file__).with_name("regressions")


def show(left: Variant, right: Variant, seed: int, scope: Scope) -> str:
    """A seed whose sides differ, cut down and saved, with the first difference in words."""
    with runners(left, right) as (one, other):
        whole = seeded(seed, LENGTH, scope)
        least = shrink(whole, lambda part: first_difference(one, other, part) is not None)
        REGRESSIONS.mkdir(exist_ok=True)
        saved = REGRESSIONS / f"{scope}-{seed}.json"
        saved.write_text(json.dumps({"scope": scope, **least.to_data()}))
        return f"seed {seed}, saved as {saved.name}: {first_difference(one, other, least)}"


def check(left: Variant, right: Variant, scope: Scope, steps: int) -> Tally:
    result = compare(left, right, seed=0, steps=steps, length=LENGTH, scope=scope)
    if result.different:
        pytest.fail(show(left, right, result.different[0], scope))
    assert result.steps == steps
    assert result.counters["states_stock_would_keep"] > 0, "no sequence crossed a gap"
    return result


@pytest.mark.parametrize("scope", ["native", "wide"])
def test_equals_native(scope: Scope, patched: Variant, native: Variant, steps: int) -> None:
    result = check(patched, native, scope, steps)
    assert result.versions[1] == "0.30.0"


def test_equals_the_newest_native_release(patched: Variant, newest: Variant, steps: int) -> None:
    result = check(patched, newest, "native", steps)
    assert result.versions[1] == newest.tree.name


def test_equals_the_native_method_on_the_same_code(
    patched: Variant, graft: Variant, steps: int
) -> None:
    check(patched, graft, "graft", steps)


def test_stock_differs_and_the_difference_is_cut_down(stock: Variant, native: Variant) -> None:
    result = compare(stock, native, seed=0, steps=2000, length=LENGTH, scope="native")
    assert result.different, "the comparison cannot see the defect"
    with runners(stock, native) as (one, other):
        whole = seeded(result.different[0], LENGTH, "native")
        least = shrink(whole, lambda part: first_difference(one, other, part) is not None)
        assert first_difference(one, other, least) is not None
    assert len(least.operations) < 20


def test_earlier_failures_stay_equal(patched: Variant, native: Variant, graft: Variant) -> None:
    """Every saved sequence; the first one is the defect itself, as stock vLLM showed it."""
    with runners(patched, native, graft) as (ours, theirs, grafted):
        for saved in sorted(REGRESSIONS.glob("*.json")):
            data = json.loads(saved.read_text())
            other = theirs if data.pop("scope") != "graft" else grafted
            difference = first_difference(ours, other, Sequence.from_data(data))
            assert difference is None, f"{saved.name}: {difference}"
