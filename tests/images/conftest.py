"""The images that the session has made, and podman's view of what is left behind."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from vllm_mamba_retire.images.engine import LABEL

LIVE = os.environ["MAMBA_RETIRE_TEST_LIVE_IMAGE"]
NATIVE = os.environ["MAMBA_RETIRE_TEST_NATIVE_IMAGE"]
SITE = "/usr/local/lib/python3.11/dist-packages"

Podman = Callable[..., str]


def podman(*arguments: str) -> str:
    done = subprocess.run(["podman", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"podman {' '.join(arguments)}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="session", name="podman")
def _podman() -> Podman:
    return podman


@pytest.fixture(scope="session")
def live() -> str:
    return LIVE


@pytest.fixture(scope="session")
def native() -> str:
    return NATIVE


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """No test leaves a container of ours behind."""
    yield
    assert podman("ps", "--all", "--quiet", f"--filter=label={LABEL}") == ""


@pytest.fixture
def derived(tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Builds an image from Containerfile lines; all of them are removed in the end."""
    made = []

    def build(*lines: str, options: tuple[str, ...] = ()) -> str:
        name = f"localhost/mamba-retire/derived:{len(made)}"
        (tmp_path / "Containerfile").write_text("\n".join(lines) + "\n")
        podman(
            "build", "-q", "--network=none", "--layers=false", "-t", name, *options, str(tmp_path)
        )
        made.append(name)
        return name

    yield build
    for name in made:
        podman("rmi", "--force", name)
