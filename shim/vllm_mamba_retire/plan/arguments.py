"""Turns vLLM's engine arguments, by their Python names, into the planner's settings.

A server prints them ("non-default args"), a command line gives them as flags; both end here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_mamba_retire.replay.scenario import InputError

from .defaults import UNKNOWN
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
# A speculative configuration by flags, since 0.29.
_SHORT = {"num_speculative_tokens": "spec_tokens", "method": "spec_method", "model": "spec_model"}
_NAMED_DRAFTERS = ("eagle-", "eagle3", "dflash", "dspark")  # methods that a drafter's name tells
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
    drafts = {name: arguments[short] for name, short in _SHORT.items() if short in arguments}
    settings |= drafting(drafts | read_object(arguments.get("speculative_config")))
    if (executor := arguments.get("distributed_executor_backend")) is not None:
        settings["executor"] = str(executor)
    if arguments.get("runner") == "pooling":
        settings.setdefault("asynchronous", False)
    if (connector := _connector(arguments)) is not None:
        settings["connector"] = connector
    return settings


def _connector(arguments: Mapping[str, Any]) -> str | None:
    connector = read_object(arguments.get("kv_transfer_config")).get("kv_connector")
    if connector is not None:
        return str(connector)
    return "KV offloading" if arguments.get("kv_offloading_size") else None


def drafting(config: Any) -> dict[str, Any]:
    """Draft tokens and method of a speculative configuration, however it is written."""
    fields = read_object(config)
    tokens = fields.get("num_speculative_tokens", fields.get("num_spec_tokens"))
    settings: dict[str, Any] = {}
    if tokens is not None:
        settings["spec"] = _number("num_speculative_tokens", tokens)
    if (method := _method(fields)) is not None:
        settings["drafter"] = method
    if fields.get("disable_padded_drafter_batch") is True:
        settings["padded_drafts"] = False
    return settings


def _method(fields: Mapping[str, Any]) -> str | None:
    """The method that ``SpeculativeConfig`` settles; `UNKNOWN` where the drafter's files decide."""
    method, model = fields.get("method"), fields.get("model")
    if method in (None, "draft_model") and model is not None:
        if model in ("ngram", "[ngram]"):
            return "ngram"
        named = (name for name in _NAMED_DRAFTERS if name in str(model).lower())
        return next(named, str(method or UNKNOWN)).rstrip("-")
    if method is None:
        return None
    return "mtp" if str(method).endswith("_mtp") else str(method).strip("[]")


def _number(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputError(f"{name}: {value!r} is not a whole number.")
    return value
