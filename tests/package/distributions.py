"""What is published, built from a folder of sources."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
LEFT_OUT = shutil.ignore_patterns(
    ".*cache", ".git", ".nox", ".venv", "__pycache__", "built", "dist", "site"
)


@dataclass(frozen=True)
class Distributions:
    """What one build made: a source archive, and the wheel made from that archive."""

    sdist: Path
    wheel: Path


def build(source: Path, umask: int = 0o022) -> Distributions:
    # Without --wheel and --sdist the wheel is built from the source archive, as pip would do.
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", "built", "."]
    done = subprocess.run(
        build, cwd=source, capture_output=True, text=True, umask=umask, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (sdist,) = (source / "built").glob("*.tar.gz")
    (wheel,) = (source / "built").glob("*.whl")
    return Distributions(sdist, wheel)
