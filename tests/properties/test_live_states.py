"""Properties of retirement on a live release's own manager, pool and prefix cache.

Hypothesis searches operation sequences for one that breaks a property. Stock vLLM breaks them on a
plain long prompt: otherwise the properties would say nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from tools.proof.sequences import ARGUMENT, OPERATIONS, ManagerShape, Operation
from tools.proof.traffic import Traffic
from vllm.v1.core import single_type_kv_cache_manager as managers

from tests.properties.oracle import BrokenError, Oracle
from vllm_mamba_retire import binding

number = st.integers(0, ARGUMENT - 1)
# Hypothesis draws evenly; what moves a request forward is drawn as often as `seeded` does.
operation = st.sampled_from([name for name, weight in OPERATIONS.items() for _ in range(weight)])


@st.composite
def geometries(draw: st.DrawFn) -> ManagerShape:
    block = draw(st.sampled_from([2, 4]))
    # Less than a block. A step with more crosses two blocks and holds a state more, on 0.30.0 too.
    spec = draw(st.sampled_from([each for each in (0, 1, 3) if each < block]))
    return ManagerShape(
        block=block,
        hash_block=block,
        pool=draw(st.sampled_from([96, 32, 20])),
        groups=draw(st.sampled_from([1, 2])),
        spec=spec,
        lag=draw(st.sampled_from([1, 0, 2, 3])),
        retention=draw(st.sampled_from([None, 0, 4 * block])),
        eagle=False,
    )


class Requests(RuleBasedStateMachine):
    """Requests come, compute, are rolled back, preempted and end; the oracle looks on."""

    @initialize(geometry=geometries())
    def build(self, geometry: ManagerShape) -> None:
        self.world = Traffic(geometry)
        self.oracle = Oracle(self.world)

    @rule(name=operation, a=number, b=number, c=number)
    def do(self, name: str, a: int, b: int, c: int) -> None:
        self.world.do((name, a, b, c))
        self.oracle.check(name)

    @rule(a=number)
    def retire_twice(self, a: int) -> None:
        self.world.do(("retire", a, 0, 0))
        self.oracle.check("retire")
        once = self.world.snapshot()
        self.world.do(("retire", a, 0, 0))
        if self.world.snapshot() != once:
            raise BrokenError("a second call changed something")

    def teardown(self) -> None:
        if hasattr(self, "oracle"):
            self.oracle.check_end()


LONG_PROMPT_IN = ManagerShape(
    block=2, hash_block=2, pool=96, groups=1, spec=0, lag=1, retention=None, eagle=False
)
# A long prompt in chunks of two blocks with a step in flight: each state lies before a null gap.
LONG_PROMPT: list[Operation] = [
    ("admit", 0, 0, 63),
    *([("chunk", 0, 1, 0), ("settle", 0, 0, 0), ("retire", 0, 0, 0)] * 6),
]


def carry_out(operations: list[Operation], **left_out: bool) -> None:
    world = Traffic(LONG_PROMPT_IN)
    oracle = Oracle(world, **left_out)
    for operation in operations:
        world.do(operation)
        oracle.check(operation[0])
    oracle.check_end()


def search() -> None:
    run_state_machine_as_test(
        Requests,
        settings=settings(
            max_examples=150,
            stateful_step_count=60,
            deadline=None,
            database=None,
            derandomize=True,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
            print_blob=False,
            report_multiple_bugs=False,
        ),
    )


@contextmanager
def patched() -> Iterator[binding.Installation]:
    yield binding.install(managers.MambaManager)
    binding.uninstall(managers.MambaManager)


def test_properties_hold_with_the_fix() -> None:
    with patched() as done:
        search()
    assert done.counters.states_stock_would_keep > 0, "the search never met a gap"


@pytest.mark.parametrize(
    ("left_out", "says"), [({"visits": False}, r"holds \d+ states"), ({"bound": False}, "visited")]
)
def test_stock_breaks_both_properties_on_a_long_prompt(
    left_out: dict[str, bool], says: str
) -> None:
    """A sequence of its own, because what a search meets first depends on its version."""
    with patched():
        carry_out(LONG_PROMPT)
    with pytest.raises(BrokenError, match=says):
        carry_out(LONG_PROMPT, **left_out)
