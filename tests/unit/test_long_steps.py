"""What the long steps of the sessions print while they run."""

from __future__ import annotations

import fcntl
import re
import sys
import threading
from pathlib import Path

import pytest
from tools.env import provision

RESOLVED = """\
Collecting torch==2.13.0
  Downloading torch-2.13.0-cp311-none-linux_x86_64.whl.metadata (29 kB)
Collecting filelock (from torch==2.13.0)
  Using cached filelock-3.20.0-py3-none-any.whl.metadata (2.1 kB)
"""
FETCHING = f"{RESOLVED}Downloading torch-2.13.0-cp311-none-linux_x86_64.whl (180 MB)\n"


@pytest.mark.parametrize(
    ("output", "shown"),
    [
        ("", "no output yet"),
        ("created virtual environment\n", "created virtual environment"),
        (RESOLVED, "Using cached filelock-3.20.0-py3-none-any.whl.metadata (2.1 kB)"),
        (
            f"{FETCHING}Progress 0 of 200\nProgress 90 of 200\n",
            "package 1 of 2: Downloading torch-2.13.0-cp311-none-linux_x86_64.whl (180 MB) 45 %",
        ),
        (
            f"{FETCHING}Using cached filelock-3.20.0-py3-none-any.whl (16 kB)\nWARNING: slow\n",
            "package 2 of 2: Using cached filelock-3.20.0-py3-none-any.whl (16 kB)",
        ),
        (f"{FETCHING}Installing collected packages: filelock, torch\n", "installing 2 packages"),
    ],
)
def test_progress_is_read_from_the_output_of_pip(output: str, shown: str) -> None:
    assert provision.progress(output) == shown


def test_a_long_step_prints_its_seconds_and_its_progress(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(provision, "LOG_SECONDS", 0.2)
    code = "import time; print('half way', flush=True); time.sleep(1)"
    provision.run("the step", sys.executable, "-c", code)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) >= 2
    assert re.search(r"the step: \d+ s, half way$", lines[-1])


def test_a_step_that_fails_ends_with_its_output() -> None:
    code = "print('the reason'); raise SystemExit(3)"
    with pytest.raises(provision.ProvisionError, match=r"(?s)the step failed: .*the reason"):
        provision.run("the step", sys.executable, "-c", code)


def test_waiting_for_another_run_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(provision, "CACHE", tmp_path)
    with provision._lock("free"):
        assert capsys.readouterr().out == ""
    other = (tmp_path / "taken.lock").open("w")
    fcntl.flock(other, fcntl.LOCK_EX)
    threading.Timer(0.5, other.close).start()
    with provision._lock("taken"):
        assert "waiting for another run, which holds" in capsys.readouterr().out
