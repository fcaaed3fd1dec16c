"""Names that are needed before anything else may be imported; this module imports nothing."""

from __future__ import annotations

MODE_VARIABLE = "MAMBA_RETIRE"
ALLOW_DRIFT_VARIABLE = "MAMBA_RETIRE_ALLOW_DRIFT"
MANAGER_MODULE = "vllm.v1.core.single_type_kv_cache_manager"
