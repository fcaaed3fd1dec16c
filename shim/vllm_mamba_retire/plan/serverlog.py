"""Reads a deployment's figures out of the log of a vLLM server.

The lines that vLLM prints while it starts; later ones overrule earlier ones. Two figures are
worked out from rounded ones and so are estimates: the pool and the bytes of a block.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_mamba_retire.replay.scenario import InputError

# Deployment field -> how vLLM 0.26 to 0.33 prints it.
_NUMBERS = {
    "block": r"Setting attention block size to ([\d,]+) tokens",
    "budget": r"Chunked prefill is enabled with max_num_batched_tokens=([\d,]+)",
    "prompt": r"Using max model len ([\d,]+)|max_seq_len=([\d,]+)",
    "pool": r"Overriding num_gpu_blocks=\d+ with num_gpu_blocks_override=(\d+)",
    "pipeline": r"pipeline_parallel_size=(\d+)",
    "spec": r"num_spec(?:ulative)?_tokens[=:] ?(\d+)",
}
_VERSION = re.compile(r"Initializing a V1 LLM engine \(v([^)\s]+)\)|\bversion (\d+\.\d+\.\d\S*)")
_ASYNC = re.compile(r"Asynchronous scheduling is (enabled|disabled)")
_ARGUMENTS = re.compile(r"non-default args: (\{.*\})")
_CONCURRENCY = re.compile(r"Maximum concurrency for ([\d,]+) tokens per request: ([\d.]+)x")
_MEMORY = re.compile(r"Available KV cache memory: ([\d.]+) GiB")
_MODE = re.compile(r"Mamba cache mode is set to '(\w+)'")
_ARGUMENT_FIELDS = {
    "max_num_batched_tokens": "budget",
    "max_model_len": "prompt",
    "num_gpu_blocks_override": "pool",
    "pipeline_parallel_size": "pipeline",
    "long_prefill_token_threshold": "chunk_limit",
}
_NEEDED = {
    "block": "Setting attention block size to",
    "budget": "Chunked prefill is enabled with max_num_batched_tokens=",
}
_GIB = 2**30


def read_log(path: Path) -> dict[str, Any]:
    """Figures by the names of `deployment.Deployment`, those that the log has.

    Raises:
        InputError: it cannot be read, or lacks a line that is needed.
    """
    try:
        text = path.read_text(errors="replace")
    except OSError as error:
        raise InputError(f"log: {path}: {error.strerror}.") from None
    figures = {**_arguments(text), **_printed(text)}
    for name, line in _NEEDED.items():
        if name not in figures:
            raise InputError(f"log: {path} has no line {line!r}, which tells the {name}.")
    figures["lag"] = _lag(figures)
    return {name: value for name, value in figures.items() if name not in ("async", "pipeline")}


def estimate_pool(path: Path, known: Mapping[str, Any]) -> dict[str, Any]:
    """Pool and bytes of a block, from the concurrency and the memory that the log tells.

    Args:
        path: the log.
        known: ``block``, ``spec``, ``groups`` and ``attention_groups`` of the deployment.
    """
    text = path.read_text(errors="replace")
    if (found := _last(_CONCURRENCY, text)) is None:
        return {}
    tokens, times = int(found[1].replace(",", "")), float(found[2])
    # vLLM counts 2 + spec states per Mamba group and a block per block of text for attention.
    blocks = known["attention_groups"] * -(-tokens // known["block"])
    pool = int(times * (blocks + known["groups"] * (2 + known["spec"])))
    memory = _last(_MEMORY, text)
    return {
        "pool": pool,
        "block_bytes": int(float(memory[1]) * _GIB / pool) if memory and pool else None,
    }


def _printed(text: str) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for name, pattern in _NUMBERS.items():
        if (found := _last(re.compile(pattern), text)) is not None:
            figures[name] = int(next(filter(None, found.groups())).replace(",", ""))
    if (found := _last(_VERSION, text)) is not None:
        figures["version"] = found[1] or found[2]
    if (found := _last(_ASYNC, text)) is not None:
        figures["async"] = found[1] == "enabled"
    if (found := _last(_MODE, text)) is not None:
        figures["align"] = found[1] == "align"
    return figures


def _arguments(text: str) -> dict[str, Any]:
    """Figures out of the dictionary of arguments that the API server prints."""
    if (found := _last(_ARGUMENTS, text)) is None:
        return {}
    try:
        given = ast.literal_eval(found[1])
    except (ValueError, SyntaxError):
        return {}  # holds an object that has no literal; the other lines have to do
    figures = {field: given[name] for name, field in _ARGUMENT_FIELDS.items() if name in given}
    if "mamba_cache_mode" in given:
        figures["align"] = given["mamba_cache_mode"] == "align"
    if given.get("enable_prefix_caching") is False:
        figures["align"] = False
    if "async_scheduling" in given:
        figures["async"] = given["async_scheduling"]
    drafting = given.get("speculative_config") or {}
    if "num_speculative_tokens" in drafting:
        figures["spec"] = drafting["num_speculative_tokens"]
    return figures


def _lag(figures: Mapping[str, Any]) -> int | None:
    """Steps in flight; None where the log does not tell."""
    pipeline = figures.get("pipeline", 1)
    if "async" not in figures:
        return pipeline - 1 if pipeline > 1 else None
    return int(pipeline - 1 + figures["async"])


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    found = list(pattern.finditer(text))
    return found[-1] if found else None
