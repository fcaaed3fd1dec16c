"""A vLLM platform that configures and never computes.

A replay or a plan on a serving machine must not claim its devices, and the CPU platform, which is
the only one that needs none, changes settings (asynchronous scheduling, state dtypes) that only a
real CPU engine has to change.
"""

from __future__ import annotations


def configure_only() -> None:
    """Make it this process's platform; call it before vLLM is asked to build a configuration."""
    from vllm import platforms
    from vllm.platforms.cpu import CpuPlatform

    class ConfigOnlyPlatform(CpuPlatform):  # type: ignore[misc]
        @classmethod
        def check_and_update_config(cls, vllm_config: object) -> None:
            """Leave the configuration as it was asked for."""

    platforms._current_platform = ConfigOnlyPlatform()
