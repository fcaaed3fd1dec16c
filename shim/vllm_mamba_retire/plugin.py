"""Entry point in vLLM's group ``vllm.general_plugins``: called once in every vLLM process."""

from __future__ import annotations


def register() -> None:
    """Arm the patch, and let other processes see that it is armed here.

    Raises:
        vllm_mamba_retire.RequireFailed: ``MAMBA_RETIRE=require`` and vLLM may leak here.
    """
    from vllm_mamba_retire import arm, is_off

    arm()
    if not is_off():
        from vllm_mamba_retire import records

        records.announce()
