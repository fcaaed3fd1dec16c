"""The unit file, as systemd reads it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed"
)
UNIT = Path(__file__).parents[2] / "docs" / "deploy" / "vllm.service"


@pytest.fixture
def text(tmp_path: Path) -> str:
    """The unit with commands that exist: systemd looks for them."""
    for name in ("vllm", "vllm-mamba-retire"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    return UNIT.read_text().replace("/opt/vllm/bin", str(tmp_path))


def verified(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    unit = folder / "vllm.service"
    unit.write_text(text)
    command = ["systemd-analyze", "verify", "--man=no", str(unit)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def complaints(done: subprocess.CompletedProcess[str]) -> list[str]:
    """What is said of this unit; other units of the machine are not ours."""
    return [line for line in done.stderr.splitlines() if "vllm.service" in line]


def test_systemd_accepts_it(tmp_path: Path, text: str) -> None:
    assert complaints(verified(tmp_path, text)) == []


@pytest.mark.parametrize(
    ("right", "wrong"), [("RestartSec=", "RestartSecs="), ("KillMode=mixed", "KillMode=gently")]
)
def test_systemd_complains_of_what_is_wrong(
    tmp_path: Path, text: str, right: str, wrong: str
) -> None:
    assert right in text
    assert complaints(verified(tmp_path, text.replace(right, wrong)))


def test_check_comes_before_the_server_and_with_its_environment() -> None:
    lines = UNIT.read_text().splitlines()
    before = lines.index("ExecStartPre=/opt/vllm/bin/vllm-mamba-retire status")
    assert lines.index("Environment=MAMBA_RETIRE=require") < before
    assert any(line.startswith("ExecStart=/opt/vllm/bin/vllm serve") for line in lines[before:])
