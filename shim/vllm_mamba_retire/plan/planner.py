"""Is it your bug, what does it cost, what would help: a deployment in, a plan out.

Closed-form figures from `bounds`; the caller may replace the peaks by replayed ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from vllm_mamba_retire.releases import Status

from .bounds import ceil_div, mib
from .deployment import Deployment

Measured = Literal["closed form", "replayed"]


@dataclass(frozen=True, slots=True)
class SidePlan:
    """One side, stock or fixed.

    Attributes:
        states: most states of one request per Mamba group, at the longest prompt.
        measured: how `states` was found; a closed form is an upper bound.
        mib: the same in MiB of the pool, all Mamba groups; None without `block_bytes`.
        smallest_pool: blocks with which one such request is never rolled back.
        longest_prompt: tokens that one request may have in this pool; None without `pool`.
        concurrency: requests of the longest prompt that fit at their worst moment; likewise.
    """

    states: int
    measured: Measured
    mib: float | None
    smallest_pool: int
    longest_prompt: int | None
    concurrency: int | None


@dataclass(frozen=True, slots=True)
class Remedy:
    """A setting that avoids the defect without the fix, and what it costs."""

    setting: str
    cost: str


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer.

    Attributes:
        affected: whether this server keeps states that it does not need.
        reason: why, or why not, in one sentence.
        stock: without the fix.
        fixed: with it.
        remedies: what would help without the fix.
    """

    affected: bool
    reason: str
    stock: SidePlan
    fixed: SidePlan
    remedies: tuple[Remedy, ...]


def plan(
    deployment: Deployment, status: Status | None, replayed: tuple[int, int] | None = None
) -> Plan:
    """Plan for a deployment.

    Args:
        deployment: the server.
        status: what its release is; None for one that is not in the table, taken for a live one.
        replayed: peak states stock and fixed where a replay has found them.
    """
    affected, reason = judge(deployment, status)
    return Plan(
        affected,
        reason,
        stock=_side(deployment, fixed=not affected, states=replayed[0] if replayed else None),
        fixed=_side(deployment, fixed=True, states=replayed[1] if replayed else None),
        remedies=tuple(_remedies(deployment)) if affected else (),
    )


def judge(deployment: Deployment, status: Status | None) -> tuple[bool, str]:
    """Whether the server is affected, and why."""
    geometry, version = deployment.geometry, deployment.version or "of unknown version"
    if status is Status.NATIVE:
        return False, f"Not affected: vLLM {version} carries the fix itself."
    if status in (Status.LATENT, Status.ABSENT):
        return False, f"Not affected: the scheduler of vLLM {version} does not reach the defect."
    if not deployment.align:
        return False, "Not affected: mamba_cache_mode is not align, there is one state a request."
    if deployment.lag == 0:
        return False, "Not affected: no chunk is in flight when the next one is scheduled."
    if not geometry.leaks:
        return False, (
            f"Not affected: a prefill chunk ({geometry.stride} tokens) spans one block of "
            f"{deployment.block} tokens and leaves no null gap."
        )
    stock, fixed = (f(deployment.prompt) for f in (geometry.stock_states, geometry.fixed_states))
    if stock <= fixed:
        return False, f"Not affected: a prompt of {deployment.prompt} tokens is too short to leak."
    return True, (
        f"Affected: a prefill chunk ({geometry.stride} tokens) spans "
        f"{geometry.stride // deployment.block} blocks of {deployment.block} tokens and "
        f"{deployment.lag} is in flight, so each chunk leaves a state behind until the request "
        "ends."
    )


def _side(deployment: Deployment, *, fixed: bool, states: int | None) -> SidePlan:
    geometry, pool, longest = deployment.geometry, deployment.pool, deployment.prompt
    bound = geometry.fixed_states(longest) if fixed else geometry.stock_states(longest)
    peak = bound if states is None else states
    size = deployment.block_bytes
    return SidePlan(
        states=peak,
        measured="closed form" if states is None else "replayed",
        mib=None if size is None else round(mib(peak * deployment.groups, size), 2),
        smallest_pool=geometry.pool(longest, peak),
        longest_prompt=None if pool is None else geometry.longest_prompt(pool, fixed=fixed),
        concurrency=None if pool is None else geometry.concurrency(pool, longest, fixed=fixed),
    )


def _remedies(deployment: Deployment) -> Iterator[Remedy]:
    """What would help without the fix, the cheapest first."""
    geometry, block = deployment.geometry, deployment.block
    chunks = ceil_div(deployment.prompt, geometry.stride)
    single = ceil_div(deployment.prompt, block)
    limit = 2 * block - 1
    yield Remedy(
        f"--long-prefill-token-threshold {limit}",
        f"chunks of one block: {single} instead of {chunks} for the longest prompt, each request "
        "prefills more slowly when it is alone; decoding keeps its budget",
    )
    yield Remedy(
        f"--max-num-batched-tokens {limit}",
        f"chunks of one block: {single} instead of {chunks} for the longest prompt, and smaller "
        "batches for everybody",
    )
    if deployment.lag == 1:
        yield Remedy(
            "--no-async-scheduling",
            "the GPU waits for the scheduler in every step, decoding steps above all",
        )
    coarser = geometry.budget // 2 + 1
    yield Remedy(
        f"--block-size {ceil_div(coarser, 16) * 16}",
        f"prefix-cache hits end on multiples of {ceil_div(coarser, 16) * 16} tokens instead of "
        f"{block}, and each block is as many times larger",
    )
    yield Remedy("--no-enable-prefix-caching", "every prompt is computed from its first token")
    needed = geometry.pool(deployment.prompt, geometry.stock_states(deployment.prompt))
    size = deployment.block_bytes
    yield Remedy(
        f"a pool of {needed} blocks",
        "no roll-back of one longest request; its states stay"
        + ("" if size is None else f", {mib(needed, size) / 1024:.1f} GiB a GPU"),
    )
    yield Remedy("vLLM 0.30.0 or newer", "an upgrade")
