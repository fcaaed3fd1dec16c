"""Decides whether a deployment leaks states, what that costs and which settings help.

Closed-form figures from `bounds`; the caller may replace the peaks by replayed ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from packaging.version import Version

from vllm_mamba_retire.names import KEEP_VARIABLE
from vllm_mamba_retire.releases import Matrix, Status
from vllm_mamba_retire.replay.scenario import InputError

from .bounds import ceil_div, mib
from .deployment import Deployment

Measured = Literal["closed form", "replayed"]


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a replay of the longest prompt on the server's release gave, on one side.

    Attributes:
        states: most states of one request per Mamba group, in an ample pool.
        rollbacks: preemptions in the server's own pool; None where that is not known.
        redone: tokens computed again there.
    """

    states: int
    rollbacks: int | None = None
    redone: int | None = None


@dataclass(frozen=True, slots=True)
class SidePlan:
    """One side, stock or fixed. What cannot be told for this server is None.

    Attributes:
        states: most states of one request per Mamba group, at the longest prompt.
        measured: how `states` was found; a closed form is an upper bound.
        mib: the same in MiB of the pool, all Mamba groups.
        smallest_pool: blocks with which the requests are never rolled back.
        longest_prompt: tokens that one request may have in this pool.
        concurrency: requests of the longest prompt that fit at their worst moment.
        rollbacks: preemptions of the requests in this pool, by replay.
        redone: tokens computed again after them.
    """

    states: int | None = None
    measured: Measured = "closed form"
    mib: float | None = None
    smallest_pool: int | None = None
    longest_prompt: int | None = None
    concurrency: int | None = None
    rollbacks: int | None = None
    redone: int | None = None


@dataclass(frozen=True, slots=True)
class Remedy:
    """A setting that avoids the defect without the fix, and what it costs."""

    setting: str
    cost: str


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer.

    Attributes:
        affected: whether this server keeps states that it does not need; None where that hangs
            on what is not known.
        reason: why, or why not, or what it hangs on, in one sentence.
        stock: without the fix.
        fixed: with it.
        remedies: what would help without the fix.
    """

    affected: bool | None
    reason: str
    stock: SidePlan
    fixed: SidePlan
    remedies: tuple[Remedy, ...]


def status_of(version: str | None, matrix: Matrix) -> Status | None:
    """What a vLLM version does with old states, by its row or the rows around it.

    Returns:
        None where the version is not known, or is a development build before the fix.

    Raises:
        InputError: no vLLM release, nor a build between two of them.
    """
    if version is None:
        return None
    parsed = Version(version)
    rows = [(Version(row.version), row.status) for row in matrix.releases]
    final = not parsed.is_prerelease
    if final and (row := matrix.row_for(version)) is not None:
        return row.status
    before = [status for release, status in rows if release <= parsed]
    newest = rows[-1][0]
    native = before[-1:] == [Status.NATIVE] and parsed.major == newest.major
    if native and (not final or parsed > newest):
        return Status.NATIVE
    if not final:  # "0.1.dev14845+g57a314d15" and "0.11.2.dev280" are builds of much newer code
        return None
    if not before:
        return Status.ABSENT
    raise InputError(
        f"vllm_version: {version} is no vLLM release that this package knows "
        f"({rows[0][0]} to {newest})."
    )


def plan(
    deployment: Deployment,
    status: Status | None,
    replayed: tuple[Replayed, Replayed] | None = None,
    requests: int = 1,
) -> Plan:
    """Plan for a deployment.

    Args:
        deployment: the server.
        status: what its release does; None where that is not known.
        replayed: replays stock and fixed, where there are any.
        requests: how many of the longest requests come at once.

    Raises:
        InputError: a figure without which there is no answer is missing.
    """
    affected, reason = judge(deployment, status)
    if deployment.missing:
        return Plan(affected, reason, SidePlan(), SidePlan(), ())
    stock, fixed = replayed or (None, None)
    return Plan(
        affected,
        reason,
        stock=_side(deployment, requests, fixed=affected is False, replayed=stock),
        fixed=_side(deployment, requests, fixed=True, replayed=fixed),
        remedies=() if affected is False else tuple(_remedies(deployment)),
    )


def judge(deployment: Deployment, status: Status | None) -> tuple[bool | None, str]:
    """Whether the server is affected, and why; None where it hangs on what is only assumed.

    Raises:
        InputError: a figure without which there is no answer is missing.
    """
    version = deployment.version or "of unknown version"
    if (reason := _not_affected(deployment, status, version)) is not None:
        return False, f"Not affected: {reason}."
    geometry = deployment.geometry
    cause = (
        f"a prefill chunk ({geometry.stride} tokens) spans {geometry.stride // geometry.block} "
        f"blocks of {geometry.block} tokens and {geometry.lag} is in flight, so each chunk leaves "
        "a state behind until the request ends"
    )
    unknown = list(_unknown(deployment, status))
    if unknown:
        return None, f"Affected if {' and '.join(unknown)}: then {cause}."
    return True, f"Affected: {cause}."


def _not_affected(deployment: Deployment, status: Status | None, version: str) -> str | None:
    """The first condition of the defect that does not hold."""
    if status is Status.NATIVE:
        return f"vLLM {version} carries the fix itself"
    if status in (Status.LATENT, Status.ABSENT):
        return f"the scheduler of vLLM {version} does not reach the defect"
    if deployment.mode == "none":
        return (
            "mamba_cache_mode is none, because prefix caching is off; there is one state a request"
        )
    if deployment.mode == "all":
        return "mamba_cache_mode is all, not align; there is a state for every block"
    if deployment.lag == 0:
        return "no chunk is in flight when the next one is scheduled"
    if deployment.missing:
        raise InputError(f"not known: give {', '.join(deployment.missing)}.")
    geometry = deployment.geometry
    if geometry.block > geometry.budget:
        return (
            f"a block of {geometry.block} tokens takes more than one prefill chunk "
            f"({geometry.budget} tokens) and leaves no null gap"
        )
    if not geometry.leaks:
        return (
            f"a prefill chunk ({geometry.stride} tokens) spans one block of {geometry.block} "
            "tokens and leaves no null gap"
        )
    assert deployment.prompt is not None
    if geometry.stock_states(deployment.prompt) <= geometry.fixed_states(deployment.prompt):
        return f"a prompt of {deployment.prompt} tokens is too short to leak"
    return None


def _unknown(deployment: Deployment, status: Status | None) -> Iterator[str]:
    """What is only assumed and could turn the answer, with the option that tells it."""
    if status is None:
        told = "the build lacks vllm#55450" if deployment.version else "it runs vLLM 0.26 to 0.29"
        yield f"{told} (--vllm-version, or vllm-mamba-retire status)"
    if deployment.is_assumed("mode"):
        yield "mamba_cache_mode is align (--mamba-cache-mode)"
    if deployment.is_assumed("lag"):
        yield "async scheduling is on (--lag)"


def _side(
    deployment: Deployment, requests: int, *, fixed: bool, replayed: Replayed | None
) -> SidePlan:
    geometry, pool, longest = deployment.geometry, deployment.pool, deployment.prompt
    assert longest is not None
    peak = geometry.fixed_states(longest) if fixed else geometry.stock_states(longest)
    if replayed is not None:
        peak = replayed.states
    size, grouped = deployment.block_bytes, deployment.grouped
    return SidePlan(
        states=peak,
        measured="closed form" if replayed is None else "replayed",
        mib=round(mib(peak * geometry.groups, size), 2) if size and grouped else None,
        smallest_pool=geometry.pool(longest, peak, requests) if grouped else None,
        longest_prompt=geometry.longest_prompt(pool, fixed=fixed) if pool and grouped else None,
        concurrency=geometry.concurrency(pool, longest, fixed=fixed) if pool and grouped else None,
        rollbacks=replayed.rollbacks if replayed else None,
        redone=replayed.redone if replayed else None,
    )


def keep_advice(deployment: Deployment, status: Status | None) -> str | None:
    """When keeping the newest states gives conversations their hits back, in one sentence.

    Args:
        deployment: the server.
        status: what its release does; None where that is not known.

    Returns:
        None where nothing is cached or kept, the pool is not known, or it holds one request.
    """
    pool, prompt = deployment.pool, deployment.prompt
    if status not in (Status.LIVE, Status.NATIVE) or not deployment.align:
        return None
    if deployment.missing or not deployment.grouped or pool is None or prompt is None:
        return None
    geometry = deployment.geometry
    prompts = geometry.prompts_until_evicted(pool, prompt)
    if prompt <= geometry.block or prompts < 1:
        return None
    return (
        f"Conversations: with the fix, {prompts} other "
        f"{'prompt' if prompts == 1 else 'prompts'} of {prompt:,} tokens, computed while a "
        "conversation of that length decodes, evict its newest state, and its next turn finds "
        f"nothing in the prefix cache; {KEEP_VARIABLE}=newest evicts that state last."
    )


def _remedies(deployment: Deployment) -> Iterator[Remedy]:
    """What would help without the fix, the cheapest first."""
    geometry, prompt = deployment.geometry, deployment.prompt
    assert prompt is not None
    block = geometry.block
    chunks = ceil_div(prompt, geometry.stride)
    single = ceil_div(prompt, block)
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
    coarser = ceil_div(geometry.budget // 2 + 1, 16) * 16
    yield Remedy(
        f"--block-size {coarser}",
        f"prefix-cache hits end on multiples of {coarser} tokens instead of {block}, and each "
        "block is as many times larger",
    )
    yield Remedy("--no-enable-prefix-caching", "every prompt is computed from its first token")
    if deployment.grouped:
        needed, size = geometry.pool(prompt, geometry.stock_states(prompt)), deployment.block_bytes
        yield Remedy(
            f"a pool of {needed} blocks",
            "no roll-back of one longest request; its states stay"
            + ("" if size is None else f", {mib(needed, size) / 1024:.1f} GiB a GPU"),
        )
    yield Remedy("vLLM 0.30.0 or newer", "an upgrade")
