"""Reads a deployment's settings out of what a vLLM server answers on ``/metrics``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from vllm_mamba_retire.replay.scenario import InputError

_CONFIGURATION = "vllm:cache_config_info"
_PREEMPTIONS = "vllm:num_preemptions_total"


def read_metrics(path: Path) -> tuple[dict[str, Any], int | None]:
    """Settings by the names of `deployment.SETTINGS`, and the preemptions since the start.

    Args:
        path: the text of ``/metrics``; ``-`` is standard input.

    Raises:
        InputError: it cannot be read, or is not vLLM's.
    """
    from prometheus_client.parser import text_string_to_metric_families

    try:
        text = sys.stdin.read() if str(path) == "-" else path.read_text(errors="replace")
    except OSError as error:
        raise InputError(f"metrics: {path}: {error.strerror}.") from None
    labels: dict[str, str] = {}
    engines = 0
    preemptions: int | None = None
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == _CONFIGURATION:
                    labels, engines = sample.labels, engines + 1
                elif sample.name == _PREEMPTIONS:
                    preemptions = (preemptions or 0) + int(sample.value)
    except ValueError as error:
        raise InputError(f"metrics: {path} is not in Prometheus' text format: {error}.") from None
    if not labels:
        raise InputError(f"metrics: {path} has no {_CONFIGURATION}; it is not vLLM's /metrics.")
    return _settings(labels, engines), preemptions


def _settings(labels: dict[str, str], engines: int) -> dict[str, Any]:
    """``CacheConfig`` as vLLM shows it: every field as text, the blocks those of all engines."""
    blocks = _number(labels.get("num_gpu_blocks"))
    settings: dict[str, Any] = {"pool": blocks and blocks // engines}
    if (caching := labels.get("enable_prefix_caching")) in ("True", "False"):
        settings["prefix_caching"] = caching == "True"
    if (mode := labels.get("mamba_cache_mode")) in ("align", "all", "none"):
        settings["mode"] = mode
    settings["block"] = _block(labels)
    memory = _number(labels.get("kv_cache_memory_bytes"))
    if memory and blocks and labels.get("num_gpu_blocks_override", "None") == "None":
        settings["block_bytes"] = memory // settings["pool"]
    return {name: value for name, value in settings.items() if value is not None}


def _block(labels: dict[str, str]) -> int | None:
    """Tokens of a block with a state.

    ``block_size`` is the smallest of all groups; before 0.29 ``mamba_block_size`` is what it was
    before vLLM enlarged it, or what was asked for, which align mode overrides.
    """
    block = _number(labels.get("block_size"))
    state = _number(labels.get("mamba_block_size"))
    if labels.get("mamba_cache_mode") == "none" or block is None or state is None:
        return block
    return block if labels.get("user_specified_mamba_block_size") == "True" else max(block, state)


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None
