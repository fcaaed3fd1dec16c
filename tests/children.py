"""A fresh interpreter to try things in."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Child = Callable[..., "subprocess.CompletedProcess[str]"]


def run(folder: Path, code: str, **environment: str | None) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter, in `folder`, with no setting of ours or vLLM's.

    Args:
        folder: working directory; records go into its ``run``.
        code: Python source text.
        environment: variables to set; None unsets one.
    """
    base = {k: v for k, v in os.environ.items() if not k.startswith(("MAMBA_RETIRE", "VLLM_"))}
    base["MAMBA_RETIRE_DIR"] = str(folder / "run")
    changed = {**base, **environment}
    return subprocess.run(
        [sys.executable, "-c", code],
        env={k: v for k, v in changed.items() if v is not None},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def eventually(condition: Callable[[], Any], what: str = "it", patience: float = 20) -> Any:
    """What `condition` returns as soon as that is true.

    Args:
        condition: called again and again.
        what: what is waited for, for the message.
        patience: seconds.
    """
    deadline = time.monotonic() + patience
    while not (result := condition()):
        assert time.monotonic() < deadline, f"{what}: not within {patience} s"
        time.sleep(0.02)
    return result
