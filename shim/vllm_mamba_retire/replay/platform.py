"""Lets vLLM's CPU platform read a configuration without changing it.

A replay or a plan on a serving machine must not use its devices. The CPU platform needs none, but
for a real CPU engine it changes settings (asynchronous scheduling, state dtypes) and requires
Triton (0.34.0 on).
"""

from __future__ import annotations


def configure_only() -> None:
    """Select the platform for this process; call it before anything else of vLLM is imported.

    Modules of vLLM keep the platform that was current at their import.
    """
    from vllm import platforms
    from vllm.platforms.cpu import CpuPlatform

    if not hasattr(platforms, "_current_platform"):
        raise AttributeError("vllm.platforms has no _current_platform")
    if not hasattr(CpuPlatform, "check_and_update_config"):
        raise AttributeError("CpuPlatform has no check_and_update_config")

    def check_and_update_config(cls: type, vllm_config: object) -> None:
        """Leave the configuration as requested."""

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
    platforms._current_platform = CpuPlatform()
