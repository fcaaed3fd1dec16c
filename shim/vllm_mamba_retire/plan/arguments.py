"""Turns vLLM's engine arguments, by their Python names, into the planner's settings.

A server prints them ("non-default args"), a command line gives them as flags; both end here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_mamba_retire.replay.scenario import InputError

from .values import read_object

# argument -> setting
_NUMBERS = {
    "max_num_batched_tokens": "budget",
    "max_num_scheduled_tokens": "scheduled",
    "max_model_len": "prompt",
    "num_gpu_blocks_override": "pool",
    "pipeline_parallel_size": "pipeline",
    "long_prefill_token_threshold": "chunk_limit",
    "kv_cache_memory_bytes": "kv_memory_bytes",
    "block_size": "block",
}
_SWITCHES = {"enable_prefix_caching": "prefix_caching", "async_scheduling": "asynchronous"}


def settings_from(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by the names of `deployment.SETTINGS`, of those arguments that decide something.

    Raises:
        InputError: such an argument has a value that cannot be read.
    """
    settings: dict[str, Any] = {}
    for name, setting in _NUMBERS.items():
        value = arguments.get(name)
        if value is None or value in ("auto", -1, 0):  # vLLM chooses, or there is no limit
            continue
        settings[setting] = _number(name, value)
    for name, setting in _SWITCHES.items():
        if (value := arguments.get(name)) is None:
            continue
        if not isinstance(value, bool):
            raise InputError(f"{name}: {value!r} is neither True nor False.")
        settings[setting] = value
    if (mode := arguments.get("mamba_cache_mode")) is not None:
        settings["mode"] = str(mode)
    short = {"num_speculative_tokens": "spec_tokens", "method": "spec_method"}  # >= 0.29
    drafts = {long: arguments[name] for long, name in short.items() if name in arguments}
    settings |= drafting(drafts | read_object(arguments.get("speculative_config")))
    connector = read_object(arguments.get("kv_transfer_config")).get("kv_connector")
    if connector is not None:
        settings["connector"] = str(connector)
    elif arguments.get("kv_offloading_size"):
        settings["connector"] = "KV offloading"
    return settings


def drafting(config: Any) -> dict[str, Any]:
    """Draft tokens and method of a speculative configuration, however it is written."""
    fields = read_object(config)
    tokens = fields.get("num_speculative_tokens", fields.get("num_spec_tokens"))
    settings: dict[str, Any] = {}
    if tokens is not None:
        settings["spec"] = _number("num_speculative_tokens", tokens)
    if fields.get("method") is not None:
        settings["drafter"] = str(fields["method"])
    return settings


def _number(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputError(f"{name}: {value!r} is not a whole number.")
    return value
