"""What every lane shares: which release is under test, and a fresh interpreter to try things in."""

from __future__ import annotations

import functools
import os
import signal
from pathlib import Path

import pytest

from tests.children import Child, run
from vllm_mamba_retire.releases import Matrix, Status, load_matrix

TESTS = Path(__file__).parent
OTHER_NAMES = {"images": "containers", "properties": "differential"}  # folder -> its session
IN_A_SESSION = any(name.startswith("MAMBA_RETIRE_TEST_") for name in os.environ)


def pytest_configure() -> None:
    """Restore the signals that tests send to the commands they run.

    A shell starts a background run with SIGINT ignored, and nohup one with SIGHUP ignored. Every
    child would inherit that.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out what needs a release or tools that only a nox session has."""
    return True if _needs_a_session(collection_path) else None


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Say what was left out, and which sessions run it."""
    asked = [Path(config.invocation_params.dir, each.split("::")[0]) for each in config.args]
    folders = [each for each in TESTS.iterdir() if _needs_a_session(each)]
    left_out = [f for f in folders if any(f in (a, *a.parents) or a in f.parents for a in asked)]
    if left_out:
        sessions = sorted({OTHER_NAMES.get(folder.name, folder.name) for folder in left_out})
        terminalreporter.line(f"SKIPPED, run with `nox -s`: {' '.join(sessions)}")


def _needs_a_session(path: Path) -> bool:
    """Whether this is, or lies in, a folder of tests that a session runs."""
    if IN_A_SESSION or TESTS not in path.parents:
        return False
    folder = TESTS / path.relative_to(TESTS).parts[0]
    return folder.name != "unit" and (folder / "__init__.py").exists()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests that are about releases of another status than this one's."""
    row = load_matrix().row_for(os.environ.get("MAMBA_RETIRE_TEST_RELEASE"))
    items[:] = [item for item in items if not _needs_a_session(item.path)]
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
    """Runs code in a fresh interpreter, see `tests.children`."""
    return functools.partial(run, tmp_path)
