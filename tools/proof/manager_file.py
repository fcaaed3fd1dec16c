"""Serves vLLM's manager module from another file, in this process.

The on-disk series and its mutants are tested this way without a copy of vLLM.
Also a pytest plug-in: ``-p tools.proof.manager_file``, with the file's name in
``MAMBA_RETIRE_PROOF_MANAGER``.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

MODULE = "vllm.v1.core.single_type_kv_cache_manager"
VARIABLE = "MAMBA_RETIRE_PROOF_MANAGER"


def serve(manager_file: Path) -> None:
    """Load the manager module from `manager_file`; it must not be imported yet."""
    if MODULE in sys.modules:
        raise RuntimeError(f"{MODULE} is imported already")
    import vllm.v1.core

    spec = importlib.util.spec_from_file_location(MODULE, manager_file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[MODULE] = module
    spec.loader.exec_module(module)
    vars(vllm.v1.core)["single_type_kv_cache_manager"] = module


def pytest_configure() -> None:
    """Serve the file before any test module is imported."""
    serve(Path(os.environ[VARIABLE]))
