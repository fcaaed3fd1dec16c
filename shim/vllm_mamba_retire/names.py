"""Defines names of modules and variables, and the accepted values of the variables.

It is loaded before vLLM, so it imports nothing.
"""

from __future__ import annotations

MODE_VARIABLE = "MAMBA_RETIRE"
ALLOW_DRIFT_VARIABLE = "MAMBA_RETIRE_ALLOW_DRIFT"
KEEP_VARIABLE = "MAMBA_RETIRE_KEEP"
MANAGER_MODULE = "vllm.v1.core.single_type_kv_cache_manager"

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")


def read_mode(value: str | None) -> str | None:
    """Read a value of ``MAMBA_RETIRE``; case and surrounding blanks are ignored.

    Returns:
        ``"auto"`` (unset, empty, auto, 1, true, yes, on), ``"require"``, ``"off"`` (off, 0, false,
        no), or None for an unknown spelling.
    """
    word = (value or "").strip().lower()
    if word in ("", "auto", *_TRUE):
        return "auto"
    if word == "require":
        return "require"
    return "off" if word in _FALSE else None


def read_keep(value: str | None) -> str | None:
    """Read a value of ``MAMBA_RETIRE_KEEP``; case and surrounding blanks are ignored.

    Returns:
        ``"none"`` (unset, empty, none, off, 0, false, no), ``"newest"``, ``"prompt"``, or None for
        an unknown spelling.
    """
    word = (value or "").strip().lower()
    if word in ("", "none", *_FALSE):
        return "none"
    return word if word in ("newest", "prompt") else None


def is_true(value: str | None) -> bool:
    """Whether a switch such as ``MAMBA_RETIRE_ALLOW_DRIFT`` is on: 1, true, yes or on."""
    return (value or "").strip().lower() in _TRUE
