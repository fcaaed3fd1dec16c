"""Runs work in forks of a process that has imported vLLM, because that import takes seconds.

A mutant and its tests must be imported anew; the modules that they use need not be.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_LIMIT = 300  # seconds; a mutant that loops for ever is killed by the clock


def in_fork(work: Callable[[], str | None]) -> str | None:
    """Do `work` in a fork of this process; return its answer, or ``clock`` after the time limit."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        answer = "did not run"
        with contextlib.suppress(BaseException):
            answer = work() or ""
        os.write(write, answer.encode())
        os._exit(0)
    os.close(write)
    try:
        if not select.select([read], [], [], _LIMIT)[0]:
            os.kill(child, signal.SIGKILL)
            return "clock"
        return os.read(read, 1 << 16).decode() or None
    finally:
        os.waitpid(child, 0)
        os.close(read)


def first_failure(path: list[Path], tests: str) -> str | None:
    """Return the first test that fails with `path` first on ``sys.path``, or None."""
    import pytest

    failed: list[str] = []

    class Watch:
        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.failed:
                failed.append(report.nodeid)

        def pytest_collectreport(self, report: Any) -> None:
            if report.failed:
                failed.append(f"{report.nodeid} (cannot be imported)")

    _silence()
    sys.path[:0] = [*map(str, path), str(ROOT)]
    os.chdir(ROOT)
    ended = pytest.main(["-x", "-q", "-p", "no:cacheprovider", tests], plugins=[Watch()])
    return failed[0] if failed else f"{tests} ended with {ended}" if ended else None


def _silence() -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
