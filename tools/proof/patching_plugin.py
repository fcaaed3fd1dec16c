"""A pytest plug-in that patches vLLM in a run of upstream's tests, and checks that it did.

With ``MAMBA_RETIRE=off`` it does nothing: that run is the control.
"""

from __future__ import annotations

import os

import pytest

import vllm_mamba_retire


def pytest_sessionstart() -> None:
    """Patch before any test is collected; ``MAMBA_RETIRE=require`` ends the run if that fails."""
    if os.environ.get("MAMBA_RETIRE") != "off":
        import vllm.v1.core.single_type_kv_cache_manager  # noqa: F401

        vllm_mamba_retire.activate()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the run if the patch is not installed any more."""
    if os.environ.get("MAMBA_RETIRE") == "off":
        return
    record = vllm_mamba_retire.current()
    if record is None or record.reason != "patched":
        session.exitstatus = pytest.ExitCode.INTERNAL_ERROR
