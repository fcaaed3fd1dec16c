"""A vLLM plug-in of the tests' own: what a CPU lacks to schedule as a GPU does.

Runs in every process of a server. It adds scheduling ahead of the model and weights under which
the output depends on the prompt; nothing in it touches what is under test. It is the harness that
needs the package to be there, so it checks first that vLLM had loaded it without help.
"""

from __future__ import annotations

import os
import sys


def register() -> None:
    if "vllm_mamba_retire.plugin" not in sys.modules:
        raise RuntimeError("vLLM did not load the installed package by itself")
    from tools.engine.worker import register_seeded_weights, schedule_ahead
    from vllm.platforms.cpu import CpuPlatform

    schedule_ahead(1)
    register_seeded_weights()
    if (method := os.environ.get("HARNESS_START_METHOD")) is not None:
        _start_processes_by(method, CpuPlatform)


def _start_processes_by(method: str, platform: type) -> None:
    """The CPU platform's check chooses spawn; a GPU server without CUDA in its parent forks."""
    check = platform.check_and_update_config.__func__  # type: ignore[attr-defined]

    def check_and_update_config(cls: type, config: object) -> None:
        check(cls, config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = method

    platform.check_and_update_config = classmethod(check_and_update_config)  # type: ignore[attr-defined]
