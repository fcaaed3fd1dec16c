"""The light lane: one real release's manager code, without the fix unless a test asks for it."""

from __future__ import annotations

import os

# Before anything imports the package: these tests put the patch on and take it off themselves.
os.environ["MAMBA_RETIRE"] = "off"

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from vllm_mamba_retire import binding
from vllm_mamba_retire.probe import build_manager

POOL = 8


@pytest.fixture
def module() -> ModuleType:
    from vllm.v1.core import single_type_kv_cache_manager  # a plain pytest has no vLLM

    return single_type_kv_cache_manager


@pytest.fixture
def patched(module: ModuleType) -> Iterator[binding.Installation]:
    yield binding.install(module.MambaManager)
    binding.uninstall(module.MambaManager)


@pytest.fixture
def manager(module: ModuleType) -> Any:
    """A manager of 4-token blocks with a pool of seven and the null block."""
    return build_manager(module, block=4, pool=POOL)
