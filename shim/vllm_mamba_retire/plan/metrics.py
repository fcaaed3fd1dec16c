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
    preemptions: int | None = None
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == _CONFIGURATION and not labels:
                    labels = sample.labels
                elif sample.name == _PREEMPTIONS:
                    preemptions = (preemptions or 0) + int(sample.value)
    except ValueError as error:
        raise InputError(f"metrics: {path} is not in Prometheus' text format: {error}.") from None
    if not labels:
        raise InputError(f"metrics: {path} has no {_CONFIGURATION}; it is not vLLM's /metrics.")
    return _settings(labels), preemptions


def _settings(labels: dict[str, str]) -> dict[str, Any]:
    """``CacheConfig`` as vLLM shows it: every field as text."""
    settings: dict[str, Any] = {"pool": _number(labels.get("num_gpu_blocks"))}
    if (caching := labels.get("enable_prefix_caching")) in ("True", "False"):
        settings["prefix_caching"] = caching == "True"
    if (mode := labels.get("mamba_cache_mode")) in ("align", "all", "none"):
        settings["mode"] = mode
    settings["block"] = _number(labels.get("block_size"))
    settings["kv_memory_bytes"] = _number(labels.get("kv_cache_memory_bytes"))
    return {name: value for name, value in settings.items() if value is not None}


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None
