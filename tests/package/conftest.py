"""Distributions built twice, from two copies of the sources that differ in what must not matter."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.package.distributions import LEFT_OUT, ROOT, Distributions, build


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shutil.copytree(ROOT, tmp_path_factory.mktemp("sources") / "first", ignore=LEFT_OUT)


@pytest.fixture(scope="session")
def first(sources: Path) -> Distributions:
    return build(sources)


@pytest.fixture(scope="session")
def second(sources: Path) -> Distributions:
    """Built elsewhere, of files with other times and modes, by a process with another umask."""
    other = shutil.copytree(sources, sources.with_name("second"), ignore=LEFT_OUT)
    for path in other.rglob("*"):
        if path.is_file():
            os.utime(path, (1_000_000_000, 1_000_000_000))
            path.chmod(path.stat().st_mode & 0o700)
    return build(other, umask=0o077)
