"""Makes vLLM's CPU platform configure without computing.

A replay or a plan on a serving machine must not claim its devices. The CPU platform needs none, but
it changes settings (asynchronous scheduling, state dtypes) and requires Triton (0.34.0 on) for the
sake of a real CPU engine.
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
