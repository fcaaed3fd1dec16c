"""Registers with vLLM: the entry point ``vllm.general_plugins``, called in every vLLM process."""

from __future__ import annotations

import contextlib


def register() -> None:
    """Arm the patch, and write a record that it is armed in this process.

    Raises:
        SystemExit: ``MAMBA_RETIRE=require`` and vLLM may leak here; an
            `activation.RequireFailed`, unless this package itself is broken.
    """
    from vllm_mamba_retire import arm, is_off

    arm()
    if not is_off():
        with contextlib.suppress(Exception):  # `arm` reports a broken part
            from vllm_mamba_retire import identity, records

            records.announce()
            if identity.role() == "API server":
                from vllm_mamba_retire import prometheus

                prometheus.expose()
