"""The command line, as tests of the series on real trees use it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patchset.real_trees import Cli


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    """Runs the command in a process of its own, as the console script does."""

    def run(
        *arguments: object,
        cwd: Path = tmp_path,
        stdin: int = subprocess.DEVNULL,
        **environment: str,
    ):
        base = {k: v for k, v in os.environ.items() if not k.startswith(("MAMBA_RETIRE", "VLLM_"))}
        return subprocess.run(
            [sys.executable, "-c", "from vllm_mamba_retire.cli import main; main()"]
            + [str(argument) for argument in arguments],
            cwd=cwd,
            env=base | environment,
            stdin=stdin,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    return run
