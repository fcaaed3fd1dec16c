"""Registers with vLLM: the entry point ``vllm.general_plugins``, called in every vLLM process."""

from __future__ import annotations


def register() -> None:
    """Arm the patch, and record for other processes that it is armed here.

    Raises:
        vllm_mamba_retire.activation.RequireFailed: ``MAMBA_RETIRE=require`` and vLLM may leak here.
    """
    from vllm_mamba_retire import arm, is_off

    arm()
    if not is_off():
        from vllm_mamba_retire import records

        records.announce()
