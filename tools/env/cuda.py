"""Finds the CUDA devices of this machine and makes an environment that uses them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path


def cuda_devices() -> list[str]:
    """Return the CUDA devices that the driver of this machine lists; empty if there are none."""
    if shutil.which("nvidia-smi") is None:
        return []
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return listed.stdout.splitlines() if listed.returncode == 0 else []


def cuda_environment() -> Path:
    """Return an interpreter with the CUDA build of the release that the CPU sessions run.

    Raises:
        Unavailable: this machine shows no CUDA device.
    """
    from tools.env import provision  # not where a run on the device imports this module

    if not cuda_devices():
        raise provision.Unavailable("no CUDA device is visible")
    tools = [f"vllm=={provision.ENGINE}", *provision.group(own=True)]
    return provision.environment("cuda", provision.preferred_python(), tools)
