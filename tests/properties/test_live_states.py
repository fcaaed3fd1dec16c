"""Properties of retirement on a live release's own manager, pool and prefix cache.

Hypothesis searches operation sequences for one that breaks a property, and the same search on the
stock class has to find one: otherwise the properties would say nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from tools.proof.sequences import ARGUMENT, OPERATIONS, Geometry
from tools.proof.traffic import Traffic
from vllm.v1.core import single_type_kv_cache_manager as managers

from tests.properties.oracle import BrokenError, Oracle
from vllm_mamba_retire import binding

number = st.integers(0, ARGUMENT - 1)
# Hypothesis draws evenly; what moves a request forward is drawn as often as `seeded` does.
operation = st.sampled_from([name for name, weight in OPERATIONS.items() for _ in range(weight)])


@st.composite
def geometries(draw: st.DrawFn) -> Geometry:
    block = draw(st.sampled_from([2, 4]))
    spec = draw(st.sampled_from([0, 1, 3]))
    return Geometry(
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

    visits = True
    bound = True

    @initialize(geometry=geometries())
    def build(self, geometry: Geometry) -> None:
        self.world = Traffic(geometry)
        self.oracle = Oracle(self.world, visits=self.visits, bound=self.bound)

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


# Stock vLLM breaks two properties, and which of them a search meets first is chance.


class HeldToTheBound(Requests):
    """Blocks may be looked at again and again; that alone is no defect."""

    visits = False


class HeldToOneVisit(Requests):
    """States may pile up."""

    bound = False


def search(machine: type[Requests], examples: int = 150) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
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
        search(Requests)
    assert done.counters.states_stock_would_keep > 0, "the search never met a gap"


def test_stock_holds_more_states_than_the_bound() -> None:
    with pytest.raises(BrokenError, match=r"holds \d+ states"):
        search(HeldToTheBound)


def test_stock_looks_at_blocks_again() -> None:
    with pytest.raises(BrokenError, match="visited"):
        search(HeldToOneVisit)
