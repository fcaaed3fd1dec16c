"""Readers of the roll-out material: Kubernetes' schemas, a compose implementation, systemd."""

from __future__ import annotations

import shutil
from pathlib import Path

from tools.env import provision

_READERS = ("kubernetes-validate>=1.31", "podman-compose")


def environment() -> Path:
    """An interpreter with this package's requirements and the readers that are Python."""
    own = map(str, provision.requirements_of(provision.own_package(), "vllm-mamba-retire"))
    python = provision.find_python(provision.PREFERRED_PYTHON) or provision.THIS_PYTHON
    return provision.environment("deploy", python, [*own, *provision.TEST_TOOLS, *_READERS])


def has_systemd() -> bool:
    """Whether systemd can check a unit file here; it need not run."""
    return shutil.which("systemd-analyze") is not None
