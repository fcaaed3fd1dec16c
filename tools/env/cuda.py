"""The CUDA devices of this machine, and an environment that uses them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path


def cuda_devices() -> list[str]:
    """CUDA devices that this machine's driver shows; empty where there are none."""
    if shutil.which("nvidia-smi") is None:
        return []
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return listed.stdout.splitlines() if listed.returncode == 0 else []


def cuda_environment() -> Path:
    """An interpreter with the CUDA build of the release that the CPU lane runs."""
    from tools.env import provision

    own = map(str, provision.requirements_of(provision.own_package(), "vllm-mamba-retire"))
    python = provision.find_python(provision.PREFERRED_PYTHON) or provision.THIS_PYTHON
    return provision.environment("cuda", python, [f"vllm=={provision.ENGINE}", *own])
