"""What every lane shares: which release is under test, and a fresh interpreter to try things in."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_mamba_retire.releases import Matrix, Status, load_matrix

Child = Callable[..., "subprocess.CompletedProcess[str]"]


def pytest_configure() -> None:
    """Hear Ctrl-C also in a run that was started in the background.

    A shell starts such a run with SIGINT ignored, and every child would inherit that; tests of an
    interrupted command need the signal to arrive.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests that are about releases of another status than this one's."""
    row = load_matrix().row_for(os.environ.get("MAMBA_RETIRE_TEST_RELEASE"))
    kept, left_out = [], []
    for item in items:
        about = item.get_closest_marker("about")
        (kept if about is None or (row and row.status in about.args) else left_out).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=left_out)


@pytest.fixture(scope="session")
def matrix() -> Matrix:
    return load_matrix()


@pytest.fixture(scope="session")
def release() -> str:
    """The vLLM release on the path, as the session names it."""
    return os.environ["MAMBA_RETIRE_TEST_RELEASE"]


@pytest.fixture(scope="session")
def status(matrix: Matrix, release: str) -> Status:
    row = matrix.row_for(release)
    assert row is not None, f"compat_matrix.yaml has no row for {release}"
    return row.status


@pytest.fixture(scope="session")
def trees() -> Path:
    """A folder that holds one folder per release."""
    return Path(os.environ["MAMBA_RETIRE_TEST_TREES"])


@pytest.fixture
def child(tmp_path: Path) -> Child:
    """Runs code in a fresh interpreter, in an empty folder, with nothing of ours set.

    Keyword arguments are environment variables; None unsets one.
    """

    def run(code: str, **environment: str | None) -> subprocess.CompletedProcess[str]:
        base = {k: v for k, v in os.environ.items() if not k.startswith(("MAMBA_RETIRE", "VLLM_"))}
        base["MAMBA_RETIRE_DIR"] = str(tmp_path / "run")
        changed = {**base, **environment}
        return subprocess.run(
            [sys.executable, "-c", code],
            env={k: v for k, v in changed.items() if v is not None},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    return run
