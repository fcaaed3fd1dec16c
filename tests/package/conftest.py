"""Distributions built twice, from two copies of the sources that differ in what must not matter."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_LEFT_OUT = shutil.ignore_patterns(
    ".*cache", ".git", ".nox", ".venv", "__pycache__", "built", "dist", "site"
)


@dataclass(frozen=True)
class Distributions:
    """What one build made: a source archive, and the wheel made from that archive."""

    sdist: Path
    wheel: Path


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shutil.copytree(ROOT, tmp_path_factory.mktemp("sources") / "first", ignore=_LEFT_OUT)


@pytest.fixture(scope="session")
def first(sources: Path) -> Distributions:
    return _build(sources)


@pytest.fixture(scope="session")
def second(sources: Path) -> Distributions:
    """Built elsewhere, of files with other times and modes, by a process with another umask."""
    other = shutil.copytree(sources, sources.with_name("second"), ignore=_LEFT_OUT)
    for path in other.rglob("*"):
        if path.is_file():
            os.utime(path, (1_000_000_000, 1_000_000_000))
            path.chmod(path.stat().st_mode & 0o700)
    return _build(other, umask=0o077)


def _build(source: Path, umask: int = 0o022) -> Distributions:
    # Without --wheel and --sdist the wheel is built from the source archive, as pip would do.
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", "built", "."]
    done = subprocess.run(
        build, cwd=source, capture_output=True, text=True, umask=umask, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (sdist,) = (source / "built").glob("*.tar.gz")
    (wheel,) = (source / "built").glob("*.whl")
    return Distributions(sdist, wheel)
