"""What is known of a deployment, where each figure comes from, and who is believed first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from vllm_mamba_retire.replay.scenario import InputError

from .bounds import Geometry

_ASSUMED: Mapping[str, Any] = {
    "version": None,
    "align": True,
    "spec": 0,
    "lag": 1,
    "groups": 3,
    "attention_groups": 1,
    "chunk_limit": None,
    "block_bytes": None,
    "pool": None,
}
_LEAST = {
    "block": 1,
    "budget": 1,
    "spec": 0,
    "lag": 0,
    "groups": 1,
    "attention_groups": 0,
    "chunk_limit": 1,
    "block_bytes": 1,
    "pool": 2,
    "prompt": 1,
}


@dataclass(frozen=True, slots=True)
class Deployment:
    """One server.

    Attributes:
        block: Mamba (= aligned attention) block size, in tokens.
        budget: ``max_num_batched_tokens``.
        prompt: longest prompt to plan for, in tokens.
        version: vLLM release; None where unknown, then taken for a live one.
        align: whether ``mamba_cache_mode`` is align, the default with prefix caching.
        spec: speculative blocks = draft tokens.
        lag: steps in flight; 1 with asynchronous scheduling, more with pipeline parallelism.
        groups: Mamba groups.
        attention_groups: attention groups.
        chunk_limit: ``long_prefill_token_threshold`` in tokens, where set.
        block_bytes: bytes of one pool block on one GPU.
        pool: ``num_gpu_blocks``.
        origins: where each figure comes from, by field name.
    """

    block: int
    budget: int
    prompt: int
    version: str | None
    align: bool
    spec: int
    lag: int
    groups: int
    attention_groups: int
    chunk_limit: int | None
    block_bytes: int | None
    pool: int | None
    origins: Mapping[str, str]

    @property
    def geometry(self) -> Geometry:
        """What decides how many states a request holds."""
        return Geometry(
            block=self.block,
            budget=min(self.budget, self.chunk_limit or self.budget),
            spec=self.spec,
            lag=self.lag,
            groups=self.groups,
            attention_groups=self.attention_groups,
        )

    def but(self, **changes: Any) -> Deployment:
        """The same server with other settings."""
        return replace(self, **changes)


def settle(sources: Mapping[str, Mapping[str, Any]]) -> Deployment:
    """Put a deployment together; of two sources that know a figure, the first is believed.

    Raises:
        InputError: a figure is missing or impossible.
    """
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for origin, known in {**sources, "assumed": _ASSUMED}.items():
        for name, value in known.items():
            if name not in values and (value is not None or origin == "assumed"):
                values[name], origins[name] = value, origin
    names = [field.name for field in fields(Deployment) if field.name != "origins"]
    for name in names:
        if name not in values:
            raise InputError(f"{name}: not known; give --{name.replace('_', '-')}.")
    for name, least in _LEAST.items():
        if values[name] is not None and values[name] < least:
            raise InputError(f"{name}: {values[name]} is less than {least}.")
    deployment = Deployment(**{name: values[name] for name in names}, origins=origins)
    _check(deployment)
    return deployment


def _check(deployment: Deployment) -> None:
    if deployment.align and deployment.budget < deployment.block:
        raise InputError(
            f"budget: {deployment.budget} tokens hold no block of {deployment.block} tokens."
        )
    geometry = deployment.geometry
    least = geometry.pool(deployment.block, geometry.fixed_states(deployment.block))
    if deployment.pool is not None and deployment.pool < least:
        raise InputError(
            f"pool: {deployment.pool} blocks are less than the {least} that a request of one "
            "block of tokens needs."
        )
