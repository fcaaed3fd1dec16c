"""A folder to run documented commands in, with the commands of an installation on the path."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import Shell

_COMMAND = """\
#!/bin/sh
exec {python} -c 'from vllm_mamba_retire.cli import main; main()' "$@"
"""


@pytest.fixture
def shell(tmp_path: Path, trees: Path) -> Shell:
    """Runs lines in bash, with the vLLM of one release to be found, or none."""
    commands = tmp_path / "bin"
    commands.mkdir()
    command = commands / "vllm-mamba-retire"
    command.write_text(_COMMAND.format(python=sys.executable))
    command.chmod(0o755)
    own = os.environ["PYTHONPATH"].split(os.pathsep)[0]

    def run(lines: str, vllm: str | None = None) -> subprocess.CompletedProcess[str]:
        path = [own, *([str(trees / vllm)] if vllm else [])]
        environment = {
            **os.environ,
            "PATH": os.pathsep.join([str(commands), os.environ["PATH"]]),
            "PYTHONPATH": os.pathsep.join(path),
            "MAMBA_RETIRE_DIR": str(tmp_path / "records"),
            "COLUMNS": "100",
        }
        work = tmp_path / "work"
        work.mkdir(exist_ok=True)
        return subprocess.run(
            ["bash", "-c", lines],
            cwd=work,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )

    return run
