"""Defines operation sequences on a KV-cache manager, as a client and a scheduler make them.

Plain data; does not depend on vLLM. An operation is a name and three small numbers that `traffic`
interprets in the current state, so every list of operations is valid and so is any part of one.
Therefore a failing sequence can be reduced.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

# How often each operation is drawn.
OPERATIONS = {
    "admit": 9,  # a new request; its id may have been used before, its text may be cached
    "chunk": 40,  # schedule the next prefill chunk or decode step of a running request
    "settle": 34,  # the oldest scheduled step of a request is done; drafts may be rejected
    "retire": 3,  # free what is settled, outside of an allocation
    "finish": 2,  # the request ends (or is aborted with steps in flight)
    "preempt": 1,  # its blocks are freed, it starts over later
    "resume": 3,  # a preempted request is admitted again and may hit its own blocks
    "roll back": 1,  # computed tokens are taken back after a failed KV load
    "pop": 1,  # the request ends, its blocks are freed later (vLLM's deferred free)
    "free popped": 2,
    "step": 4,  # a new scheduler step starts
    "reset": 1,  # the prefix cache is dropped, if nothing is running
}
_NAMES = tuple(OPERATIONS)
_WEIGHTS = tuple(OPERATIONS.values())
ARGUMENT = 64  # arguments are in [0, ARGUMENT)

Operation = tuple[str, int, int, int]
Scope = Literal["native", "wide", "graft"]


@dataclass(frozen=True, slots=True)
class ManagerShape:
    """The manager under test.

    Attributes:
        block: Mamba (= attention) block size, in tokens.
        hash_block: hash granularity in tokens; less than `block` allows partial hits.
        pool: blocks in the pool, the null block among them.
        groups: Mamba groups that share the pool with one attention group.
        spec: speculative blocks = draft tokens per decode step.
        lag: steps of one request that may be scheduled and not settled, minus one.
        retention: ``prefix_cache_retention_interval`` in tokens; None keeps every state.
        eagle: the drafter is EAGLE or MTP: a hit leaves out its last block.
    """

    block: int
    hash_block: int
    pool: int
    groups: int
    spec: int
    lag: int
    retention: int | None
    eagle: bool


@dataclass(frozen=True, slots=True)
class Sequence:
    """A manager and the operations on it, in order."""

    geometry: ManagerShape
    operations: tuple[Operation, ...]

    def to_data(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return asdict(self)

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> Sequence:
        """The inverse of `to_data`."""
        operations = tuple((str(name), a, b, c) for name, a, b, c in data["operations"])
        return cls(ManagerShape(**data["geometry"]), operations)


def geometry(choose: Callable[[list[Any]], Any], scope: Scope) -> ManagerShape:
    """Return a geometry; `choose` picks each part from a list that begins with the simplest.

    The scope names what a release is compared with, which limits the geometries in which its other
    code behaves the same. With 0.30.0 itself: "native", dense retention and hits of whole blocks;
    and "wide", also sparse retention and partial hits, or else an EAGLE drafter, but not both:
    0.30.0 changed which states a drafter's prompt keeps and where its tail is cached. With 0.30.0's
    method on the release's own code: "graft", everything.
    """
    block = choose([4, 2, 8])
    free = scope != "native"
    spec = choose([0, 1, 3, 5])
    hash_block = choose([block, block // 2]) if free else block
    pool = choose([96, 48, 32, 24, 16])
    groups, lag = choose([1, 2, 3]), choose([1, 0, 2, 3])
    retention = choose([None, 0, 4 * block]) if free else None
    eagle = bool(spec) and free and choose([False, True])
    if scope == "wide" and eagle:
        hash_block, retention = block, None
    return ManagerShape(block, hash_block, pool, groups, spec, lag, retention, eagle)


def seeded(seed: int, length: int, scope: Scope) -> Sequence:
    """Return the sequence of a seed."""
    draw = random.Random(f"{scope} {seed}")
    shape = geometry(draw.choice, scope)
    names = draw.choices(_NAMES, _WEIGHTS, k=length)
    numbers = draw.choices(range(ARGUMENT), k=3 * length)
    operations = zip(names, numbers[::3], numbers[1::3], numbers[2::3], strict=True)
    return Sequence(shape, tuple(operations))


def batches(seed: int, steps: int, length: int, scope: Scope) -> Iterator[tuple[int, Sequence]]:
    """Yield seeds from `seed` on with their sequences, `steps` operations in all."""
    for number in range(-(-steps // length)):
        yield seed + number, seeded(seed + number, min(length, steps - number * length), scope)
