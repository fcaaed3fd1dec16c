"""What is known of a deployment, where each figure comes from, and which source counts first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from packaging.version import InvalidVersion, Version

from vllm_mamba_retire.replay.scenario import InputError

from .bounds import Geometry
from .defaults import ALL_MODE_ARCHITECTURES, UNKNOWN, Defaults, defaults_of

ASSUMED = "assumed"
GIVEN = "given"
# Least value of each figure that a deployment has.
_LEAST = {
    "block": 1,
    "budget": 1,
    "prompt": 1,
    "spec": 0,
    "lag": 0,
    "groups": 1,
    "attention_groups": 0,
    "chunk_limit": 1,
    "scheduled": 1,
    "block_bytes": 1,
    "pool": 2,
}
# Settings beside those figures that a source may know.
_OTHERS = (
    "version",
    "mode",
    "prefix_caching",
    "asynchronous",
    "pipeline",
    "runner",
    "drafter",
    "padded_drafts",
    "executor",
    "ray_v2",
    "architecture",
    "connector",
    "kv_memory_bytes",
)
SETTINGS = (*_LEAST, *_OTHERS)
_SUPPLIED_BY = {
    "block": "--block (vLLM prints 'Setting attention block size to N tokens') or --model",
    "budget": "--budget (vLLM's max_num_batched_tokens)",
    "prompt": "--prompt (tokens of the longest prompt)",
}


@dataclass(frozen=True, slots=True)
class Deployment:
    """One server. A figure that no source knows is None.

    Attributes:
        block: Mamba (= aligned attention) block size, in tokens.
        budget: ``max_num_batched_tokens``.
        prompt: longest prompt to plan for, in tokens.
        version: vLLM release.
        mode: ``mamba_cache_mode``: align, all or none.
        spec: speculative blocks = draft tokens.
        lag: steps in flight; 1 with asynchronous scheduling, more with pipeline parallelism.
        groups: Mamba groups.
        attention_groups: attention groups.
        chunk_limit: ``long_prefill_token_threshold`` in tokens, where set.
        scheduled: ``max_num_scheduled_tokens``, where it is not the budget.
        block_bytes: bytes of one pool block on one GPU.
        pool: ``num_gpu_blocks``.
        connector: KV connector, where one is configured.
        drafter: method of speculative decoding.
        origins: where each figure comes from, by field name.
    """

    block: int | None
    budget: int | None
    prompt: int | None
    version: str | None
    mode: str
    spec: int
    lag: int
    groups: int | None
    attention_groups: int | None
    chunk_limit: int | None
    scheduled: int | None
    block_bytes: int | None
    pool: int | None
    connector: str | None
    drafter: str | None
    origins: Mapping[str, str]

    @property
    def align(self) -> bool:
        """Whether ``mamba_cache_mode`` is align."""
        return self.mode == "align"

    @property
    def grouped(self) -> bool:
        """Whether the cache groups are known, without which no pool can be counted."""
        return self.groups is not None and self.attention_groups is not None

    @property
    def missing(self) -> tuple[str, ...]:
        """What has to be known before anything can be counted, with the options that supply it."""
        return tuple(text for name, text in _SUPPLIED_BY.items() if getattr(self, name) is None)

    @property
    def geometry(self) -> Geometry:
        """What decides how many states a request holds; only where nothing is `missing`."""
        assert self.block is not None
        assert self.budget is not None
        limits = (self.budget, self.scheduled, self.chunk_limit)
        return Geometry(
            block=self.block,
            budget=min(limit for limit in limits if limit is not None),
            spec=self.spec,
            lag=self.lag,
            groups=self.groups or 0,
            attention_groups=self.attention_groups or 0,
            mode=self.mode,
        )

    def is_assumed(self, name: str) -> bool:
        """Whether a figure stands for one that nobody has told."""
        return self.origins[name] == ASSUMED

    def replace(self, **changes: Any) -> Deployment:
        """The same server with other settings."""
        return replace(self, **changes)


def merge_sources(sources: Mapping[str, Mapping[str, Any]]) -> Deployment:
    """Put a deployment together; of two sources that know a figure, the first counts.

    Raises:
        InputError: a figure is impossible, or the version is no version.
    """
    values: dict[str, Any] = dict.fromkeys(SETTINGS)
    origins: dict[str, str] = {}
    for origin, known in sources.items():
        for name, value in known.items():
            if values[name] is None and value is not None:
                values[name], origins[name] = value, origin
    for name, least in _LEAST.items():
        if values[name] is not None and values[name] < least:
            raise InputError(f"{name}: {values[name]} is less than {least}.")
    values["version"] = _clean(values["version"])
    _fill(values, origins)
    fields = [name for name in Deployment.__dataclass_fields__ if name != "origins"]
    deployment = Deployment(
        **{name: values[name] for name in fields},
        origins={name: origins.get(name, "not known") for name in fields},
    )
    _check(deployment)
    return deployment


def _clean(version: str | None) -> str | None:
    if version is None:
        return None
    text = version.strip().strip(",;'\"")
    try:
        Version(text)
    except InvalidVersion:
        raise InputError(f"vllm_version: {version!r} is no version.") from None
    return text.removeprefix("v")


def _fill(values: dict[str, Any], origins: dict[str, str]) -> None:
    """Settings that follow from others, from the release's defaults, or from an assumption."""
    defaults = defaults_of(values["version"])
    default = f"default of vLLM {values['version']}"

    def put(name: str, value: Any, origin: str) -> None:
        values[name], origins[name] = value, origin

    put("mode", *_mode(values, origins, defaults, default))
    if values["lag"] is None:
        put("lag", *_lag(values, origins, defaults, default))
    if values["spec"] is None:
        put("spec", 0, ASSUMED)


def _mode(
    values: Mapping[str, Any], origins: Mapping[str, str], defaults: Defaults | None, default: str
) -> tuple[str, str]:
    """``mamba_cache_mode`` as ``MambaModelConfig`` settles it, and where that comes from."""
    caching, origin = values["prefix_caching"], origins.get("prefix_caching", default)
    mode = values["mode"]
    if mode not in (None, "align", "all", "none"):
        raise InputError(f"mamba_cache_mode: {mode!r} is neither align, all nor none.")
    if origins.get("mode") == GIVEN:
        return mode, GIVEN
    if caching is None and defaults is not None:
        caching = defaults.prefix_caching
    if caching is False:
        return "none", origin
    if caching is None:
        return mode or "align", ASSUMED
    if mode in ("align", "all"):
        return mode, origins["mode"]
    if defaults is None:
        return "align", ASSUMED
    if not defaults.all_mode:
        return "align", default if origin == default else f"{default} with prefix caching"
    if values["architecture"] is None:
        return "align", ASSUMED
    return ("all" if values["architecture"] in ALL_MODE_ARCHITECTURES else "align"), (
        f"{default} for {values['architecture']}"
    )


def _lag(
    values: Mapping[str, Any], origins: Mapping[str, str], defaults: Defaults | None, default: str
) -> tuple[int, str]:
    """Steps in flight as ``VllmConfig.max_concurrent_batches`` less one, and its source."""
    asynchronous, origin = values["asynchronous"], origins.get("asynchronous", default)
    pipeline = values["pipeline"] or 1
    if asynchronous is None and defaults is not None:
        asynchronous = _asynchronous(values, defaults)
    if asynchronous is None:
        return max(pipeline - 1, 1), origins["pipeline"] if pipeline > 1 else ASSUMED
    if pipeline > 1:
        origin = origins["pipeline"]
    if not asynchronous:
        return pipeline - 1, origin
    runner = values["runner"] or (defaults.runner if defaults else "V1")
    # The V1 runner does not overlap asynchronous scheduling with pipeline parallelism.
    return (pipeline if runner == "V2" or pipeline == 1 else pipeline - 1), origin


def _asynchronous(values: Mapping[str, Any], defaults: Defaults) -> bool | None:
    """Whether ``VllmConfig`` turns asynchronous scheduling on where it is not told to; None where
    the drafter's files or an executor's class decide."""
    old_ray = values["executor"] == "ray" and values["ray_v2"] is False
    waits = values["drafter"] in defaults.synchronous_drafters
    if waits or old_ray or values["padded_drafts"] is False:
        return False
    own = values["executor"] in (None, "mp", "uni", "ray", "external_launcher")
    return True if own and values["drafter"] != UNKNOWN else None


def _check(deployment: Deployment) -> None:
    if deployment.block is None or deployment.budget is None:
        return
    defaults = defaults_of(deployment.version)
    widest = min(deployment.budget, deployment.chunk_limit or deployment.budget)
    if deployment.align and defaults and not defaults.wide_blocks and deployment.block > widest:
        raise InputError(
            f"block: vLLM {deployment.version} does not start so: in Mamba cache align mode, "
            f"block_size ({deployment.block}) must be <= max_num_batched_tokens and "
            f"long_prefill_token_threshold ({widest})."
        )
    if deployment.pool is None or not deployment.grouped:
        return
    geometry = deployment.geometry
    least = geometry.pool(deployment.block, geometry.fixed_states(deployment.block))
    if deployment.pool < least:
        raise InputError(
            f"pool: {deployment.pool} blocks are less than the {least} that a request of one "
            "block of tokens needs."
        )
