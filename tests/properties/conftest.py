"""The properties hold on a release's own manager and pool; the tests put the fix on themselves."""

from __future__ import annotations

import os

# Before anything imports the package or vLLM.
os.environ["MAMBA_RETIRE"] = "off"
os.environ["VLLM_LOGGING_LEVEL"] = "CRITICAL"
